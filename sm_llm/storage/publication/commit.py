"""Writing a publication step by step: seal, upload, part manifest, and the one commit that makes it exist."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.base import Copy
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.files import fsync_path, fsync_tree
from sm_llm.storage.publication.manifest import CommitManifest, FileEntry, PartManifest, Save, decode, encode
from sm_llm.storage.stored_names import usable
from sm_llm.storage.transfer import default_transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sm_llm.storage.base import Progress, Store, Transfer

_TRIES = 5


def new_save(run_id: str, step: int | None, *, world_size: int, node_count: int) -> Save:
    """A fresh save of ``step`` (None: the final result). Rank 0 draws it and broadcasts it."""
    # 128 random bits: two saves of one step, also of two attempts, never share a key.
    return Save(run_id=run_id, step=step, save_id=secrets.token_hex(16), world_size=world_size, node_count=node_count)


def seal(working: Path, sealed: Path) -> Path:
    """Flush a finished folder and rename it: a sealed folder is complete and never changes again.

    Raises ``StorageError`` if ``working`` holds no file, or ``sealed`` exists already.
    """
    if sealed.exists():
        raise StorageError(f"{sealed}: is sealed already")
    _files(working)
    try:
        # Flushed before the rename: after a crash, whatever has the sealed name must be whole.
        fsync_tree(working)
        sealed.parent.mkdir(parents=True, exist_ok=True)
        working.rename(sealed)
        fsync_path(sealed.parent)
    except OSError as error:
        raise StorageError(f"cannot seal {working} as {sealed}: {error}") from error
    return sealed


def _files(folder: Path) -> list[Path]:
    """Regular files below ``folder``, sorted; anything else there, or nothing at all, is an error."""
    found: list[Path] = []
    for current, folders, names in os.walk(folder, onerror=_raise_unreadable):
        paths = [Path(current, name) for name in names]
        # What a link points at may change after the folder was sealed.
        odd = [Path(current, name) for name in (*folders, *names) if Path(current, name).is_symlink()]
        odd += [path for path in paths if not path.is_file()]
        if odd:
            raise StorageError(f"{odd[0]}: is not a plain file, so it cannot be published")
        found += paths
    if not found:
        raise StorageError(f"{folder}: holds no file to publish")
    return sorted(found)


def _raise_unreadable(error: OSError) -> None:
    raise StorageError(f"cannot read {error.filename} to publish it: {error}") from error


def upload_part(
    store: Store,
    save: Save,
    sealed: Path,
    node: int,
    *,
    transfer: Transfer | None = None,
    progress: Progress = lambda _: None,
) -> PartManifest:
    """Store this node's files below the save's data prefix and compare what the store now holds with the originals.

    Raises ``StorageError`` when a file cannot be stored, or is stored with another size or checksum.
    """
    prefix = save.data_prefix
    copies = [_copy_of(path, prefix + path.relative_to(sealed).as_posix()) for path in _files(sealed)]
    stored = (transfer or default_transfer(store)).upload(store, copies, progress)
    for copy, result in zip(copies, stored, strict=True):
        if (result.key, result.size, result.crc64nvme) != (copy.key, copy.size, copy.crc64nvme):
            raise StorageError(
                f"{store.uri}: {copy.key!r} was stored as {result.size} bytes with checksum {result.crc64nvme}, "
                f"but the original has {copy.size} bytes and {copy.crc64nvme}"
            )
    entries = (FileEntry(path=it.key[len(prefix) :], size=it.size, crc64nvme=it.crc64nvme) for it in copies)
    return PartManifest(save=save, node=node, files=tuple(entries))


def _copy_of(path: Path, key: str) -> Copy:
    try:
        return Copy(key, path, path.stat().st_size, crc64_file(path))
    except OSError as error:
        raise StorageError(f"cannot read {path} to publish it: {error}") from error


def write_part(store: Store, part: PartManifest) -> None:
    """Store a node's part manifest. A lost answer is settled by reading it back. Raises ``StorageError``."""
    key = part.save.slot.part_key(part.save.save_id, part.node)
    body = encode(part)
    if _put_and_read_back(store, key, body) != body:
        raise StorageError(f"{store.uri}: {key!r} holds another node's part; two nodes call themselves {part.node}")


def _put_and_read_back(store: Store, key: str, body: bytes) -> bytes:
    """Create ``key`` and return what it holds: ``body``, or what another writer put there first.

    A lost answer is settled by reading. If the key is not there and cannot be created, the last error is raised;
    then, and only then, it may still turn up later (nothing of ours must be deleted on that account).
    """
    failure: StorageError | None = None
    for attempt in range(_TRIES):
        # A pause only after an error. If the key existed and is gone again, it can be created at once.
        if failure is not None:
            time.sleep(random.uniform(0, 0.05 * 2**attempt))
        try:
            if store.put_if_absent(key, body):
                return body
            held = store.get(key)
        except StorageError as error:
            failure = error
            # Only the answer may be lost: the object may be stored all the same.
            held = _get_quietly(store, key)
        if held is not None:
            return held
    raise failure or StorageError(f"{store.uri}: {key!r} exists for the writer, but not for the reader")


def _get_quietly(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except StorageError:
        return None


@dataclass(frozen=True)
class CommitResult:
    """How a commit ended: ``won`` is whether ``commit`` is ours; if not, ``reason`` names its owner.

    ``commit`` is None when another writer's commit holds the slot but cannot be read. ``lost`` is then what ours
    would have been: the save is stored, and nothing names it.
    """

    won: bool
    commit: CommitManifest | None
    reason: str = ""
    lost: CommitManifest | None = None


def commit(
    store: Store, save: Save, meta: Mapping[str, Any] | None = None, *, clock: Callable[[], float] = time.time
) -> CommitResult:
    """Rank 0, after every node's part is in: check the save as stored and create its one commit.

    Losing the slot to another writer is a result, not an error. Raises ``StorageError`` when a part is missing or
    contradicts the save, when stored data differ from the parts, or when the store does not answer.
    """
    # Read from the store, and not taken from the nodes' own reports: a restore will have nothing else.
    files = _merge(_read_parts(store, save))
    _compare_listing(store, save, files)
    ours = CommitManifest(
        save=save, nonce=secrets.token_hex(16), time=clock(), files=tuple(files), meta=dict(meta or {})
    )
    held = _put_and_read_back(store, save.slot.commit_key, encode(ours))
    try:
        found = decode(held, CommitManifest)
    except ValueError as error:
        # Our own commit can be decoded, so this one is another writer's.
        return CommitResult(False, None, f"{save.slot} has a commit that cannot be used: {error}", ours)
    if found.nonce == ours.nonce:
        return CommitResult(True, found)
    writer = "another save" if found.run_id == save.run_id else f"run {found.run_id!r}"
    return CommitResult(False, found, f"{save.slot} was committed first by {writer} ({found.save_id})", ours)


def _read_parts(store: Store, save: Save) -> list[PartManifest]:
    parts = []
    for node in range(save.node_count):
        key = save.slot.part_key(save.save_id, node)
        body = store.get(key)
        if body is None:
            raise StorageError(f"{store.uri}: {key!r} is missing: node {node} has not reported what it stored")
        try:
            part = decode(body, PartManifest)
        except ValueError as error:
            raise StorageError(f"{store.uri}: {key!r} cannot be used: {error}") from error
        if part.save != save or part.node != node:
            raise StorageError(f"{store.uri}: {key!r} belongs to another save or node, or to another world size")
        parts.append(part)
    return parts


def _merge(parts: Sequence[PartManifest]) -> list[FileEntry]:
    files = [entry for part in parts for entry in part.files]
    twice = [path for path, count in Counter(entry.path for entry in files).items() if count > 1]
    if twice:
        raise StorageError(f"{twice[0]!r} comes from more than one node")
    return sorted(files, key=lambda entry: entry.path)


def _compare_listing(store: Store, save: Save, files: Sequence[FileEntry]) -> None:
    prefix = save.data_prefix
    # Names and sizes are enough: each node compared the checksums of its files when it stored them.
    listed = {it.key[len(prefix) :]: it.size for it in store.list(prefix)}
    expected = {entry.path: entry.size for entry in files}
    if listed != expected:
        wrong = sorted(path for path in listed.keys() | expected if listed.get(path) != expected.get(path))
        raise StorageError(
            f"{store.uri}: {prefix + wrong[0]!r} is stored with {listed.get(wrong[0])} bytes, "
            f"the parts say {expected.get(wrong[0])} ({len(wrong)} such files)"
        )


def keep(store: Store, lost: CommitManifest) -> None:
    """Store the manifest of a save that lost its slot beside its files: the garbage collection then leaves both.

    Raises ``StorageError``.
    """
    _put_and_read_back(store, lost.save.slot.kept_key(lost.save_id), encode(lost))


def discard(store: Store, save: Save) -> None:
    """Delete what was stored of a save that has no commit and never will; what cannot be deleted is garbage.

    Only for the process that would have written the commit: nobody else knows that there is none.
    """
    try:
        # Failure is harmless: the collection finds saves without a commit by their age.
        store.delete(usable((it.key for it in store.list(save.slot.save_prefix(save.save_id))), store.uri))
    except StorageError:
        return
