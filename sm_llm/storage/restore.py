"""Reading publications: which commit is the newest that can be trusted, and its files, verified, on local disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.base import Copy, MissingObjectError, Progress, Store, Transfer
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.files import fsync_path
from sm_llm.storage.layout import COMMITS, FINAL, Slot, slot_of_commit
from sm_llm.storage.manifest import CommitManifest, FileEntry, decode
from sm_llm.storage.transfer import CopyTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_FETCHES = 3
"""One fetch and two more of what arrived wrong."""


@dataclass(frozen=True)
class Rejected:
    """A commit that was passed over, to be told loudly. ``step`` None is the final result."""

    step: int | None
    reason: str

    def __str__(self) -> str:
        return f"{Slot(self.step)}: {self.reason}"


@dataclass(frozen=True)
class Newest:
    """What ``find_newest`` found: ``commit`` (None: this run has no checkpoint yet) and what it passed over."""

    commit: CommitManifest | None
    rejected: tuple[Rejected, ...] = ()


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint: size in bytes, time in seconds since the epoch, and why it is invalid if it is."""

    step: int
    size: int
    time: float | None
    valid: bool
    reason: str = ""


@dataclass(frozen=True)
class Examined:
    """One commit object as found: ``commit`` if it could be read, ``fault`` if it must not be used.

    ``foreign`` marks the commit of another run, which counts for nothing here.
    """

    key: str
    slot: Slot
    commit: CommitManifest | None
    fault: str | None = None
    foreign: bool = False


def commit_keys(store: Store) -> list[tuple[Slot, str]]:
    """Every checkpoint commit, by ascending step number; of two names of one number the padded one comes last."""
    slots = ((slot_of_commit(it.key), it.key) for it in store.list(COMMITS))
    steps = [(slot, key) for slot, key in slots if slot is not None and slot.step is not None]
    return sorted(steps, key=lambda it: (it[0].step or 0, it[1] == it[0].commit_key, it[1]))


def examine(store: Store, key: str, slot: Slot, run_id: str | None = None) -> Examined | None:
    """Read one commit and compare its data with a listing (names and sizes). None if the commit is gone."""
    body = store.get(key)
    if body is None:
        return None
    try:
        commit = decode(body, CommitManifest)
    except ValueError as error:
        return Examined(key, slot, None, f"its commit cannot be used: {error}")
    if run_id is not None and commit.run_id != run_id:
        return Examined(key, slot, commit, f"it belongs to run {commit.run_id!r}", foreign=True)
    if commit.step != slot.step:
        return Examined(key, slot, commit, f"its commit is of {Slot(commit.step)}")
    faults = verify(store, commit)
    return Examined(key, slot, commit, faults[0] if faults else None)


def verify(store: Store, commit: CommitManifest, *, deep: bool = False) -> list[str]:
    """What is wrong with a commit's data: missing files, other sizes, and (``deep``) other checksums as stored.

    Raises ``StorageError`` if the store does not answer.
    """
    prefix = commit.save.data_prefix
    listed = {it.key[len(prefix) :]: it.size for it in store.list(prefix)}
    faults = []
    for entry in commit.files:
        size = listed.get(entry.path)
        if size is None:
            faults.append(f"{entry.path!r} is missing")
        elif size != entry.size:
            faults.append(f"{entry.path!r} has {size} bytes instead of {entry.size}")
        elif deep and store.checksum(prefix + entry.path) != entry.crc64nvme:
            faults.append(f"{entry.path!r} has other content than was published")
    return faults


def find_newest(
    store: Store, *, run_id: str | None = None, allow_step: Callable[[int], bool] | None = None
) -> Newest:
    """The newest valid checkpoint by step number, and every newer commit that had to be passed over.

    With ``run_id`` another run's commits are ignored; ``allow_step`` narrows the choice. One process decides and
    tells the others. Raises ``StorageError`` if the store does not answer, and ``CheckpointError`` if commits exist
    but none is usable: neither may ever look like a run that has not begun.
    """
    rejected: list[Rejected] = []
    for slot, key in reversed(commit_keys(store)):
        if allow_step is not None and not allow_step(slot.step or 0):
            continue
        found = examine(store, key, slot, run_id)
        if found is None or found.foreign:
            continue
        if found.fault is None:
            return Newest(found.commit, tuple(rejected))
        rejected.append(Rejected(slot.step, found.fault))
    refuse_if_all_rejected(store, rejected)
    return Newest(None)


def refuse_if_all_rejected(store: Store, rejected: Sequence[Rejected]) -> None:
    """Raise ``CheckpointError`` when checkpoints exist, but every one was passed over."""
    if rejected:
        listed = "\n".join(f"  - {it}" for it in rejected)
        raise CheckpointError(
            f"{store.uri}: has checkpoints, but none can be used:\n{listed}\n"
            "Nothing was started. Repair or remove them, or start anew explicitly"
        )


def find_final(store: Store, *, run_id: str | None = None) -> CommitManifest | None:
    """The commit of the run's final result, or None if there is none yet (another run's counts as none).

    Raises ``CheckpointError`` if it exists and is damaged, ``StorageError`` if the store does not answer.
    """
    found = examine(store, FINAL.commit_key, FINAL, run_id)
    if found is None or found.foreign:
        return None
    if found.fault is not None:
        raise CheckpointError(f"{store.uri}: the final result cannot be used: {found.fault}")
    return found.commit


def list_checkpoints(store: Store, *, run_id: str | None = None) -> list[CheckpointInfo]:
    """Every committed checkpoint of the run by ascending step, valid or not. Raises ``StorageError``."""
    infos = []
    for slot, key in commit_keys(store):
        found = examine(store, key, slot, run_id)
        if found is not None and not found.foreign:
            infos.append(_info(found))
    return infos


def _info(found: Examined) -> CheckpointInfo:
    size, at = (found.commit.size, found.commit.time) if found.commit else (0, None)
    return CheckpointInfo(found.slot.step or 0, size, at, found.fault is None, found.fault or "")


def fetch(
    store: Store,
    commit: CommitManifest,
    target: Path,
    *,
    select: Callable[[FileEntry], bool] | None = None,
    transfer: Transfer | None = None,
    progress: Progress = lambda _: None,
) -> Path:
    """Bring a commit's files (those ``select`` wants) below ``target``; returns ``target``.

    A file gets its name only after its bytes, read back from the device, match the manifest; one that is there
    already and matches is not fetched again. Raises ``CheckpointError`` if a file is missing in the store or still
    differs after two more tries, ``StorageError`` if store or disk does not answer.
    """
    wanted = [entry for entry in commit.files if select is None or select(entry)]
    missing = [entry for entry in wanted if not _matches(target / entry.path, entry)]
    progress(sum(it.size for it in wanted) - sum(it.size for it in missing))
    for _ in range(_FETCHES):
        if not missing:
            return target
        missing = _fetch_once(store, commit, target, missing, transfer or CopyTransfer(), progress)
    if missing:
        raise CheckpointError(
            f"{store.uri}: {Slot(commit.step)}: {missing[0].path!r} has other content than was published"
        )
    return target


def _fetch_once(
    store: Store,
    commit: CommitManifest,
    target: Path,
    entries: Sequence[FileEntry],
    transfer: Transfer,
    progress: Progress,
) -> list[FileEntry]:
    """Fetch to ``.part`` names, give verified files their names; returns the entries that arrived wrong."""
    prefix = commit.save.data_prefix
    copies = [Copy(prefix + it.path, target / f"{it.path}.part", it.size, it.crc64nvme) for it in entries]
    try:
        for copy in copies:
            copy.path.unlink(missing_ok=True)
        transfer.download(store, copies, progress)
        return [entry for entry, copy in zip(entries, copies, strict=True) if not _accept(copy, target / entry.path)]
    except MissingObjectError as error:
        raise CheckpointError(f"{Slot(commit.step)}: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot fetch {Slot(commit.step)} to {target}: {error}") from error


def _accept(copy: Copy, final: Path) -> bool:
    if copy.path.stat().st_size != copy.size or crc64_file(copy.path, from_disk=True) != copy.crc64nvme:
        copy.path.unlink()
        return False
    copy.path.replace(final)
    fsync_path(final.parent)
    return True


def _matches(path: Path, entry: FileEntry) -> bool:
    try:
        return path.stat().st_size == entry.size and crc64_file(path, from_disk=True) == entry.crc64nvme
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


@dataclass(frozen=True)
class Restored:
    """What all processes now have: the commit whose files lie in ``folder``, and what was passed over."""

    commit: CommitManifest
    folder: Path
    rejected: tuple[Rejected, ...] = ()


def restore(
    store: Store,
    target: Path,
    *,
    run_id: str | None,
    leader: bool,
    fetches: bool,
    gather: Callable[[Any], Sequence[Any]],
    allow_step: Callable[[int], bool] | None = None,
    select: Callable[[FileEntry], bool] | None = None,
    transfer: Transfer | None = None,
    progress: Progress = lambda _: None,
) -> Restored | None:
    """Restore the newest checkpoint, called by every process: one decides, all get the same, all fall back together.

    The ``leader`` (rank 0) lists and decides; each process with ``fetches`` (one per node) brings the files to
    ``target/<save_id>``. If any of them finds the data damaged, all go on to the commit before it. None: the run
    has no checkpoint. Raises, on all processes alike, ``CheckpointError`` if none is usable and ``StorageError`` if
    store or disk does not answer.
    """
    rejected: list[Rejected] = []
    while True:
        allowed = _without({it.step for it in rejected}, allow_step)
        newest = _decide(store, run_id, leader, gather, allowed)
        rejected += newest.rejected
        if newest.commit is None:
            refuse_if_all_rejected(store, rejected)
            return None
        folder = target / newest.commit.save_id
        fault = _fetch_together(store, newest.commit, folder, fetches, gather, select, transfer, progress)
        if fault is None:
            return Restored(newest.commit, folder, tuple(rejected))
        rejected.append(Rejected(newest.commit.step, fault))


def _without(refused: set[int | None], allow_step: Callable[[int], bool] | None) -> Callable[[int], bool]:
    return lambda step: step not in refused and (allow_step is None or allow_step(step))


def _decide(
    store: Store,
    run_id: str | None,
    leader: bool,
    gather: Callable[[Any], Sequence[Any]],
    allow_step: Callable[[int], bool],
) -> Newest:
    found: Newest | None = None
    error: CheckpointError | StorageError | None = None
    if leader:
        try:
            found = find_newest(store, run_id=run_id, allow_step=allow_step)
        except (CheckpointError, StorageError) as caught:
            error = caught
    told: list[tuple[Newest | None, CheckpointError | StorageError | None]] = list(gather((found, error)))
    for newest, failure in told:
        if failure is not None:
            raise failure
        if newest is not None:
            return newest
    raise AssertionError("no process was the leader")


def _fetch_together(
    store: Store,
    commit: CommitManifest,
    folder: Path,
    fetches: bool,
    gather: Callable[[Any], Sequence[Any]],
    select: Callable[[FileEntry], bool] | None,
    transfer: Transfer | None,
    progress: Progress,
) -> str | None:
    """Fetch on every node; the first node's damage report, or None if all have their files."""
    damaged: str | None = None
    unanswered: str | None = None
    try:
        if fetches:
            fetch(store, commit, folder, select=select, transfer=transfer, progress=progress)
    except CheckpointError as error:
        damaged = str(error)
    except StorageError as error:
        unanswered = str(error)
    outcomes = list(gather((damaged, unanswered)))
    for process, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise StorageError(f"restoring {Slot(commit.step)} failed: process {process}: {failure}")
    return next((f"process {process}: {fault}" for process, (fault, _) in enumerate(outcomes) if fault), None)
