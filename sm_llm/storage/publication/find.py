"""Which publications count: every commit read, checked against its data, and the newest one that can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.base import TooLargeError
from sm_llm.storage.publication.keys import COMMITS, FINAL, Slot, slot_of_commit
from sm_llm.storage.publication.manifest import CommitManifest, decode
from sm_llm.storage.stored_names import report_unknown
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.storage.base import Store


# Times that a commit is read again because it changed meanwhile; a commit is written once, and deleted once.
_ATTEMPTS = 10
# Each further listing is taken only after every listed commit was gone when it was read.
_LISTINGS = 3


@dataclass(frozen=True)
class Rejected:
    """A commit that was passed over, to be reported as a warning. ``step`` None is the final result."""

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
    problem: str | None = None
    foreign: bool = False


def commit_keys(store: Store) -> list[tuple[Slot, str]]:
    """Every checkpoint commit, by ascending step number; of two names of one number the padded one comes last."""
    slots = [(slot_of_commit(it.key), it.key) for it in store.list(COMMITS)]
    report_unknown(store.uri, (key for slot, key in slots if slot is None))
    steps = [(slot, key) for slot, key in slots if slot is not None and slot.step is not None]
    return sorted(steps, key=lambda it: (it[0].step or 0, it[1] == it[0].commit_key, it[1]))


def examine(store: Store, key: str, slot: Slot, run_id: str | None = None, *, deep: bool = False) -> Examined | None:
    """Read one commit and compare its data with a listing (names and sizes; ``deep``: and contents).

    None if the commit is gone, also where it went, and its data with it, while it was read. Raises
    ``StorageError`` if the store does not answer.
    """
    for _ in range(_ATTEMPTS):
        try:
            body = store.get(key)
        except TooLargeError as error:
            return Examined(key, slot, None, f"its commit cannot be used: {error}")
        if body is None:
            return None
        try:
            found = _judge(store, key, slot, body, run_id, deep)
        except StorageError:  # of a file that went, too
            if store.get(key) == body:
                raise
            continue
        # A fault counts only while the commit is there. The collection deletes a commit before its data, so a commit
        # that is gone by now explains missing files.
        if found.problem is None or store.get(key) == body:
            return found
    return Examined(key, slot, None, f"its commit was another one at each of {_ATTEMPTS} reads")


def _judge(store: Store, key: str, slot: Slot, body: bytes, run_id: str | None, deep: bool) -> Examined:
    try:
        commit = decode(body, CommitManifest)
    except ValueError as error:
        return Examined(key, slot, None, f"its commit cannot be used: {error}")
    # Before its data are listed: another run's commit counts for nothing, whatever its state.
    if run_id is not None and commit.run_id != run_id:
        return Examined(key, slot, commit, f"it belongs to run {commit.run_id!r}", foreign=True)
    if commit.step != slot.step:
        return Examined(key, slot, commit, f"its commit is of {Slot(commit.step)}")
    problems = verify(store, commit, deep=deep)
    return Examined(key, slot, commit, problems[0] if problems else None)


def verify(store: Store, commit: CommitManifest, *, deep: bool = False) -> list[str]:
    """What is wrong with a commit's data: missing files, other sizes, and (``deep``) other checksums as stored.

    Raises ``StorageError`` if the store does not answer.
    """
    prefix = commit.save.data_prefix
    listed = {it.key[len(prefix) :]: it.size for it in store.list(prefix)}
    problems = []
    for entry in commit.files:
        size = listed.get(entry.path)
        if size is None:
            problems.append(f"{entry.path!r} is missing")
        elif size != entry.size:
            problems.append(f"{entry.path!r} has {size} bytes instead of {entry.size}")
        elif deep and store.checksum(prefix + entry.path) != entry.crc64nvme:
            problems.append(f"{entry.path!r} has other content than was published")
    return problems


def find_newest(store: Store, *, run_id: str | None = None, allow_step: Callable[[int], bool] | None = None) -> Newest:
    """The newest valid checkpoint by step number, and every newer commit that had to be passed over.

    With ``run_id`` another run's commits are ignored; ``allow_step`` narrows the choice. One process decides and
    broadcasts it. Raises ``StorageError`` if the store does not answer, and ``CheckpointError`` if commits exist
    but none is usable: neither may ever look like a run that has not begun.
    """
    for _ in range(_LISTINGS):
        newest, gone = _newest_listed(store, run_id, allow_step)
        if newest.commit is not None:
            return newest
        refuse_if_all_rejected(store, newest.rejected)
        # Commits that were deleted between listing and reading were replaced by newer ones: list again.
        if not gone:
            return newest
    # Collection always leaves the newest checkpoint, so one listing may be outdated, but not every one.
    raise StorageError(
        f"{store.uri}: lists {counted(len(gone), 'commit')}, the newest as {gone[0]!r}, and returns none of them. "
        "Nothing was started. Start again when the store answers as it should"
    )


def _newest_listed(
    store: Store, run_id: str | None, allow_step: Callable[[int], bool] | None
) -> tuple[Newest, list[str]]:
    """The newest valid checkpoint of one listing, and the keys of commits that were gone when they were read."""
    rejected: list[Rejected] = []
    gone: list[str] = []
    # Newest first, up to the first valid one: to examine all would list the data of every checkpoint.
    for slot, key in reversed(commit_keys(store)):
        if allow_step is not None and not allow_step(slot.step or 0):
            continue
        found = examine(store, key, slot, run_id)
        if found is None:
            gone.append(key)
        elif found.problem is None:
            return Newest(found.commit, tuple(rejected)), []
        elif not found.foreign:
            rejected.append(Rejected(slot.step, found.problem))
    return Newest(None, tuple(rejected)), gone


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
    if found.problem is not None:
        raise CheckpointError(f"{store.uri}: the final result cannot be used: {found.problem}")
    return found.commit


def list_checkpoints(store: Store, *, run_id: str | None = None, deep: bool = False) -> list[CheckpointInfo]:
    """Every committed checkpoint of the run by ascending step, valid or not; ``deep`` reads all of their data.

    Raises ``StorageError``.
    """
    infos = []
    for slot, key in commit_keys(store):
        found = examine(store, key, slot, run_id, deep=deep)
        if found is not None and not found.foreign:
            infos.append(_info(found))
    return infos


def _info(found: Examined) -> CheckpointInfo:
    size, at = (found.commit.size, found.commit.time) if found.commit else (0, None)
    return CheckpointInfo(found.slot.step or 0, size, at, found.problem is None, found.problem or "")
