"""The verbs of Neuron's cache of compiled graphs: list it, and delete what is of no use any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.contract.compile_cache import STALE_MINUTES, CachedGraph, graphs, stale_locks
from sm_llm.errors import StorageRefused
from sm_llm.spec.parallelism.nxd import COMPILE_CACHE
from sm_llm.storage.uri import join, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.storage.base import Store
    from sm_llm.storage.s3.s3_options import S3Options


@dataclass(frozen=True)
class Removed:
    """What was deleted: graphs or locks by key, and bytes."""

    location: str
    keys: tuple[str, ...]
    size: int


def cache_location(address: str) -> str:
    """The cache at ``address``, or the one beside the runs that are stored there."""
    plain = address.rstrip("/")
    # Users know the storage of their runs; the folder beside them has a fixed name.
    return plain if plain.rpartition("/")[2] == COMPILE_CACHE else join(plain, COMPILE_CACHE)


def ls(address: str, options: S3Options | None = None) -> list[CachedGraph]:
    """Every graph in the cache at ``address`` (or beside the runs there), by job's part, compiler and name.

    Raises ``StorageError`` if the storage does not answer.
    """
    return graphs(_store(address, options))


def clear(
    address: str, *, failed_only: bool = True, compiler: str | None = None, options: S3Options | None = None
) -> Removed:
    """Delete graphs that failed to compile, or all of them; with ``compiler``, those of one version alone.

    A run that compiles at the same time writes its graphs again. Raises ``StorageError``.
    """
    chosen = [
        it
        for it in ls(address, options)
        if (it.state == "failed" or not failed_only) and compiler in (None, it.compiler, _version(it.compiler))
    ]
    return _delete(address, options, [key for it in chosen for key in it.files], sum(it.size for it in chosen))


def unlock(address: str, *, older_than_minutes: float = STALE_MINUTES, options: S3Options | None = None) -> Removed:
    """Delete locks that are older than so many minutes, by the storage's clock. Raises ``StorageError``."""
    # NaN must fail as well.
    if not older_than_minutes >= 0:
        raise StorageRefused(f"older_than_minutes must be 0 or more, got {older_than_minutes}")
    stale = stale_locks(_store(address, options), older_than_minutes)
    return _delete(address, options, [it.key for it in stale], sum(it.size for it in stale))


def _store(address: str, options: S3Options | None) -> Store:
    return open_store(cache_location(address), options)


def _delete(address: str, options: S3Options | None, keys: list[str], size: int) -> Removed:
    if keys:
        _store(address, options).delete(keys)
    return Removed(cache_location(address), tuple(keys), size)


def _version(compiler: str) -> str:
    """``neuronxcc-2.23.6484.0+3b612583`` -> ``2.23.6484.0``."""
    return compiler.partition("-")[2].partition("+")[0]


def summary(found: list[CachedGraph]) -> Iterator[tuple[str, dict[str, int], int]]:
    """(compiler, graphs by state, bytes) of each compiler."""
    for compiler in sorted({it.compiler for it in found}):
        own = [it for it in found if it.compiler == compiler]
        states = {state: sum(it.state == state for it in own) for state in ("compiled", "failed", "not compiled")}
        yield compiler, states, sum(it.size for it in own)
