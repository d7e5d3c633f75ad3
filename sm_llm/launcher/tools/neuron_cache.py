"""The cache of graphs that Neuron has compiled: what is in it, and what of it is of no use any more.

Neuron keeps each graph at ``neuronxcc-<version>/MODULE_<graph>+<flags>/``: the graph (``model.hlo_module.pb``), what
the compiler made of it (``model.neff``, ``model.done``), or why it failed (``model.log``). Files named ``….lock``
belong to a process that compiles; one that was killed leaves them behind, and others wait for it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.errors import StorageError
from sm_llm.spec.parallelism.nxd import COMPILE_CACHE
from sm_llm.storage.uri import join, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.storage.base import Store, StoredObject
    from sm_llm.storage.s3.s3_options import S3Options

State = Literal["compiled", "failed", "not compiled"]
_ENTRY = re.compile(r"(?P<compiler>neuronxcc-[^/]+)/(?P<graph>MODULE_[^/]+)/[^/]+(?:/.*)?")
_LOCK = re.compile(r"neuronxcc-[^/]+/(?:.*/)?[^/]+\.lock")
STALE_MINUTES = 60.0
"""A lock older than this is taken for one of a process that is gone: the compiler renews none."""


@dataclass(frozen=True)
class CachedGraph:
    """One graph of one compiler and set of flags. ``size`` in bytes."""

    compiler: str
    graph: str
    state: State
    size: int
    files: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Removed:
    """What was deleted: graphs or locks by key, and bytes."""

    place: str
    keys: tuple[str, ...]
    size: int


def cache_place(address: str) -> str:
    """The cache at ``address``, or the one beside the runs that are stored there."""
    plain = address.rstrip("/")
    return plain if plain.rpartition("/")[2] == COMPILE_CACHE else join(plain, COMPILE_CACHE)


def ls(address: str, options: S3Options | None = None) -> list[CachedGraph]:
    """Every graph in the cache at ``address`` (or beside the runs there), by compiler and name.

    Raises ``StorageError`` if the storage does not answer.
    """
    held: dict[tuple[str, str], list[StoredObject]] = {}
    for it in _store(address, options).list(""):
        if match := _ENTRY.fullmatch(it.key):
            held.setdefault((match["compiler"], match["graph"]), []).append(it)
    return [
        CachedGraph(compiler, graph, _state(files), sum(it.size for it in files), tuple(it.key for it in files))
        for (compiler, graph), files in sorted(held.items())
    ]


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
    if not older_than_minutes >= 0:
        raise StorageError(f"older_than_minutes must be 0 or more, got {older_than_minutes}")
    store = _store(address, options)
    locks = [it for it in store.list("") if _LOCK.fullmatch(it.key)]
    limit = _now(store) - 60 * older_than_minutes if locks else 0.0
    # A lock without a date may be one that a compiler holds.
    stale = [it for it in locks if it.modified is not None and it.modified <= limit]
    return _delete(address, options, [it.key for it in stale], sum(it.size for it in stale))


def _now(store: Store) -> float:
    """The time by the storage's clock, in seconds since the epoch: that of an object which is written for it.

    This machine's may run ahead, and then locks of compilers that still run would count as old.
    """
    key = f"clock-{secrets.token_hex(8)}"
    store.put_if_absent(key, b"")
    try:
        written = [it.modified for it in store.list(key)]
    finally:
        store.delete([key])
    if written and written[0] is not None:
        return written[0]
    raise StorageError(f"{store.uri}: its clock cannot be read, so the age of locks is not known")


def _store(address: str, options: S3Options | None) -> Store:
    return open_store(cache_place(address), options)


def _delete(address: str, options: S3Options | None, keys: list[str], size: int) -> Removed:
    if keys:
        _store(address, options).delete(keys)
    return Removed(cache_place(address), tuple(keys), size)


def _state(files: list[StoredObject]) -> State:
    names = {it.key.rpartition("/")[2] for it in files}
    if "model.neff" in names:
        return "compiled"
    return "failed" if "model.log" in names else "not compiled"


def _version(compiler: str) -> str:
    """``neuronxcc-2.23.6484.0+3b612583`` -> ``2.23.6484.0``."""
    return compiler.partition("-")[2].partition("+")[0]


def summary(graphs: list[CachedGraph]) -> Iterator[tuple[str, dict[str, int], int]]:
    """(compiler, graphs by state, bytes) of each compiler."""
    for compiler in sorted({it.compiler for it in graphs}):
        own = [it for it in graphs if it.compiler == compiler]
        states = {state: sum(it.state == state for it in own) for state in ("compiled", "failed", "not compiled")}
        yield compiler, states, sum(it.size for it in own)
