"""The half of a sync that ends in S3: compare, store with checksums, and check what the store then holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.base import Copy
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.engines.common import each
from sm_llm.storage.syncing.scan import describe
from sm_llm.storage.syncing.sync_memory import SyncMemory
from sm_llm.storage.syncing.sync_settings import SyncProgress, SyncSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.storage.base import Store, StoredObject

_WORKERS = 8


def store_files(store: Store, folder: Path, items: Sequence[StoredObject], settings: SyncSettings) -> None:
    """Store ``items``, files below ``folder``, under their keys; ``settings.report`` holds what was done."""
    wanted, settings.report.left_out = settings.selection.apply(items)
    memory = SyncMemory(folder, store.uri)
    there = {it.key: it for it in store.list("")}
    checksums = each(_WORKERS, lambda it: _different(store, folder, it, there.get(it.key), memory), wanted)
    missing = [(it, checksum) for it, checksum in zip(wanted, checksums, strict=True) if checksum is not None]
    report = settings.report
    report.copied = [it.key for it, _ in missing]
    report.copied_size = sum(it.size for it, _ in missing)
    report.unchanged = len(wanted) - len(missing)
    report.unchanged_size = sum(it.size for it in wanted) - report.copied_size
    if missing and not settings.dry_run:
        copies = [Copy(it.key, folder / it.key, it.size, checksum) for it, checksum in missing]
        _store(store, copies, [it for it, _ in missing], settings)
        _compare(store, folder, [it for it, _ in missing], {it.key: it for it in copies}, memory)
    memory.save()


def _different(
    store: Store, folder: Path, local: StoredObject, remote: StoredObject | None, memory: SyncMemory
) -> str | None:
    """The checksum of a file that must be stored; None if the object equals it."""
    same_size = remote is not None and remote.size == local.size
    if remote is not None and same_size and memory.are_equal(remote, local):
        return None
    try:
        checksum = crc64_file(folder / local.key)
    except OSError as error:
        raise StorageError(f"{folder / local.key}: cannot be read: {error.strerror}") from error
    if remote is None or not same_size:
        return checksum
    kept = memory.checksum(remote)
    if kept is None and (found := store.head(remote.key)) is not None:
        kept = found.crc64nvme
    if kept != checksum:
        return checksum
    memory.note(remote, local, checksum)
    return None


def _store(store: Store, copies: Sequence[Copy], items: Sequence[StoredObject], settings: SyncSettings) -> None:
    meter = SyncProgress(sum(it.size for it in copies), settings.progress)
    for copy, result in zip(copies, settings.transfer.upload(store, copies, meter), strict=True):
        if (result.size, result.crc64nvme) != (copy.size, copy.crc64nvme):
            raise StorageError(
                f"{store.uri}: {copy.key!r} was stored as {result.size} bytes with checksum {result.crc64nvme}, "
                f"but {copy.path} has {copy.size} bytes and {copy.crc64nvme}"
            )


def _compare(
    store: Store, folder: Path, items: Sequence[StoredObject], copies: Mapping[str, Copy], memory: SyncMemory
) -> None:
    """List what is there now: every file with its size. A file that changed meanwhile is reported."""
    there = {it.key: it for it in store.list("")}
    for item in items:
        found, now = there.get(item.key), describe(item.key, folder / item.key)
        if found is None or found.size != item.size:
            raise StorageError(
                f"{store.uri}: {item.key!r} is not listed with its {item.size} bytes after it was stored"
            )
        if now is None or now.tag != item.tag:
            raise StorageError(f"{folder / item.key}: changed while it was being stored. Store it again when it rests")
        memory.note(found, item, copies[item.key].crc64nvme)
