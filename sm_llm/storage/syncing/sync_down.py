"""The half of a sync that ends in a folder: compare, fetch aside, verify what is on disk, then name it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.file_names import brought_problem
from sm_llm.storage.arrival import accept, clear_leftovers, journal_of, part_of
from sm_llm.storage.base import Copy, MissingObjectError, StoredObject
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.engines.common import MIB, each
from sm_llm.storage.syncing.scan import describe
from sm_llm.storage.syncing.sync_memory import SyncMemory
from sm_llm.storage.syncing.sync_settings import SyncProgress, SyncSettings
from sm_llm.storage.transfer import download_and_settle
from sm_llm.storage.uri import is_s3

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sm_llm.storage.base import Store

# One fetch and two more of what arrived wrong.
_FETCHES = 3

_SPARE_BYTES = 16 * MIB
_WORKERS = 8


def fetch_files(store: Store, items: Sequence[StoredObject], target: Path, settings: SyncSettings) -> None:
    """Bring ``items`` of ``store`` below ``target``; ``settings.report`` holds what was done."""
    wanted, settings.report.left_out = settings.selection.apply(items)
    _require_names(store, wanted)
    memory = SyncMemory(target, store.uri)
    are_equal = each(_WORKERS, lambda it: _is_equal(store, it, target, memory), wanted)
    missing = [it for it, equal in zip(wanted, are_equal, strict=True) if not equal]
    report = settings.report
    report.unchanged, report.unchanged_size = len(wanted) - len(missing), _size(wanted) - _size(missing)
    report.copied, report.copied_size = [it.key for it in missing], _size(missing)
    if settings.dry_run:
        return
    if missing:
        _require_space(target, missing)
        with memory.begin(it.key for it in missing):
            _fetch(store, missing, target, memory, settings)
    _clear_half_fetched(target, memory)
    memory.save()


def _clear_half_fetched(target: Path, memory: SyncMemory) -> None:
    """Remove what syncs that were killed have left of files that this one left out, or that their source has lost."""
    with memory.alone() as alone:
        if not alone or not memory.begun:
            return
        parts = [part_of(target / key) for key in memory.begun]
        try:
            clear_leftovers(parts)
            for part in parts:
                part.unlink(missing_ok=True)
                journal_of(part).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{target}: half-fetched files cannot be removed: {error}") from error
        # Folders that were made for these files alone; one that holds anything else stays.
        above = {folder for part in parts for folder in part.relative_to(target).parents[:-1]}
        for folder in sorted(above, key=lambda it: len(it.parts), reverse=True):
            with suppress(OSError):
                (target / folder).rmdir()
        memory.begun.clear()


def _fetch(
    store: Store, items: Sequence[StoredObject], target: Path, memory: SyncMemory, settings: SyncSettings
) -> None:
    meter = SyncProgress(_size(items), settings.progress)
    left = list(items)
    try:
        for _ in range(_FETCHES):
            left = _fetch_once(store, left, target, memory, settings, meter)
            if not left:
                return
            # These bytes come again.
            meter(-_size(left))
    except OSError as error:
        raise StorageError(f"cannot fetch to {target}: {error}") from error
    finally:
        # After an error, too: the next sync need not read again what this one has verified.
        memory.save()
    raise StorageError(f"{store.uri}: {left[0].key!r} arrives with other content than it has there, three times")


def _fetch_once(
    store: Store,
    items: Sequence[StoredObject],
    target: Path,
    memory: SyncMemory,
    settings: SyncSettings,
    meter: SyncProgress,
) -> list[StoredObject]:
    """Fetch, verify and name; returns what arrived wrong."""
    copies = [Copy(it.key, part_of(target / it.key), it.size, memory.checksum(it) or "") for it in items]
    items_by_key = {it.key: it for it in items}

    def settle(copy: Copy, reported: str | None) -> bool:
        item = items_by_key[copy.key]
        # A HEAD only where neither the transfer nor an earlier sync brought a checksum.
        known = item if reported or copy.crc64nvme else _known(store, item)
        # The best that is known: the transfer's own, that of an earlier sync, the store's, and else the MD5 of an ETag.
        checksum, final = reported or copy.crc64nvme or known.crc64nvme or "", target / item.key
        if not checksum and known.md5 and not _has_md5(copy.path, known.md5):
            copy.path.unlink()
            return False
        if not accept(copy, final, checksum):
            return False
        if not checksum and not known.md5:
            settings.report.unverified.append(item.key)
        local = describe(item.key, final)
        if local is not None:
            memory.note(item, local, checksum)
        return True

    wrong = download_and_settle(settings.transfer, store, copies, meter, settle)
    return [items_by_key[it.key] for it in wrong]


def _is_equal(store: Store, item: StoredObject, target: Path, memory: SyncMemory) -> bool:
    """Whether the file is there with the object's content; proved by reading unless nothing changed since."""
    path = target / item.key
    local = describe(item.key, path)
    if local is None or local.size != item.size:
        return False
    if memory.are_equal(item, local):
        return True
    checksum = memory.checksum(item)
    known = replace(item, crc64nvme=checksum) if checksum else _known(store, item)
    try:
        equal = (
            crc64_file(path) == known.crc64nvme if known.crc64nvme else bool(known.md5 and _has_md5(path, known.md5))
        )
    except OSError as error:
        raise StorageError(f"{path}: cannot be compared: {error.strerror}") from error
    if equal:
        memory.note(item, local, known.crc64nvme or "")
    return equal


def _known(store: Store, item: StoredObject) -> StoredObject:
    """An object with the checksums the store keeps; reading the whole object to know one would be no saving."""
    if not is_s3(store.uri):
        return replace(item, crc64nvme=store.checksum(item.key))
    found = store.head(item.key)
    if found is None:
        raise MissingObjectError(f"{store.uri}: {item.key!r} has gone since it was listed")
    return found


def _has_md5(path: Path, md5: str) -> bool:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest() == md5


def _require_names(store: Store, items: Sequence[StoredObject]) -> None:
    """Every key must be a path below the folder, and no file may be a folder too."""
    keys = {it.key for it in items}
    for key in keys:
        if problem := brought_problem(key):
            raise StorageError(
                f"{store.uri}: {key!r} cannot be the name of a file here: {problem}. Leave it out with --exclude"
            )
        parts = key.split("/")
        for depth in range(1, len(parts)):
            if (folder := "/".join(parts[:depth])) in keys:
                raise StorageError(f"{store.uri}: {folder!r} is an object and, for {key!r}, a folder. No disk has both")


def _require_space(target: Path, items: Sequence[StoredObject]) -> None:
    """Free bytes on the disk of ``target`` must do for what is fetched, beside what half-fetched files hold already."""
    location = target
    while not location.exists():
        location = location.parent
    held: dict[str, int] = defaultdict(int)
    for item in items:
        part = part_of(target / item.key)
        # Blocks and not the size: ranges are written in any order, so such a file has holes.
        held[item.key] = part.stat().st_blocks * 512 if part.is_file() else 0
    needed = sum(max(it.size - held[it.key], 0) for it in items)
    free = shutil.disk_usage(location).free
    if needed + min(_SPARE_BYTES, needed) > free:
        raise StorageError(
            f"{target}: {needed:,} bytes are to be fetched, but only {free:,} are free on this disk. "
            "Nothing was fetched. Name another disk, or take less with --include"
        )
    if not os.access(location, os.W_OK):
        raise StorageError(f"{location}: is not writable")


def _size(items: Sequence[StoredObject]) -> int:
    return sum(it.size for it in items)
