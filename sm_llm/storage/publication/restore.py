"""Reading publications: a commit's files, verified, on the local disk of every node, the same commit everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.arrival import accept, part_of
from sm_llm.storage.base import Copy, MissingObjectError, WrongContentError
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.publication.find import Newest, Rejected, find_newest, refuse_if_all_rejected
from sm_llm.storage.publication.keys import Slot
from sm_llm.storage.publication.verified import Verified
from sm_llm.storage.transfer import default_transfer, download_and_settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sm_llm.storage.base import Gather, Progress, Store, Transfer
    from sm_llm.storage.publication.manifest import CommitManifest, FileEntry

# One fetch and two more of what arrived wrong.
_FETCHES = 3


def fetch(
    store: Store,
    commit: CommitManifest,
    target: Path,
    *,
    select: Callable[[FileEntry], bool] | None = None,
    transfer: Transfer | None = None,
    progress: Progress = lambda _: None,
    marker: Path | None = None,
) -> Path:
    """Bring a commit's files (those ``select`` wants) below ``target``; returns ``target``.

    A file gets its name only after its bytes, read back from the device, match the manifest; one that is there
    already and matches is not fetched again: the first call of ``progress`` counts those. With a ``marker`` (a file
    outside of ``target``) what an earlier call has verified and nobody has touched since is not even read. Raises
    ``CheckpointError`` if a file is missing in the store or still differs after two more tries, ``StorageError`` if
    store or disk does not answer.
    """
    wanted = [entry for entry in commit.files if select is None or select(entry)]
    verified = Verified(marker)
    missing = [entry for entry in wanted if not _matches(target / entry.path, entry, verified)]
    progress(sum(it.size for it in wanted) - sum(it.size for it in missing))
    for _ in range(_FETCHES):
        if not missing:
            break
        missing = _fetch_once(store, commit, target, missing, transfer or default_transfer(store), progress)
    if missing:
        raise CheckpointError(
            f"{store.uri}: {Slot(commit.step)}: {missing[0].path!r} has other content than was published"
        )
    _remember(verified, target, wanted)
    return target


def _remember(verified: Verified, target: Path, entries: Sequence[FileEntry]) -> None:
    try:
        for entry in entries:
            verified.note(target / entry.path, entry.crc64nvme)
        verified.save()
    except OSError as error:
        raise StorageError(f"cannot note what was fetched to {target}: {error}") from error


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

    def settle(copy: Copy, _: str | None) -> bool:
        return accept(copy, target / copy.key.removeprefix(prefix), copy.crc64nvme)

    copies = [Copy(prefix + it.path, part_of(target / it.path), it.size, it.crc64nvme) for it in entries]
    try:
        wrong = download_and_settle(transfer, store, copies, progress, settle)
    # Proof that this commit is damaged, for which all nodes fall back. Any other error of the store proves nothing.
    except (MissingObjectError, WrongContentError) as error:
        raise CheckpointError(f"{Slot(commit.step)}: {error}") from error
    except OSError as error:
        raise StorageError(f"cannot fetch {Slot(commit.step)} to {target}: {error}") from error
    return [it for it in entries if prefix + it.path in {copy.key for copy in wrong}]


def _matches(path: Path, entry: FileEntry, verified: Verified) -> bool:
    if verified.holds(path, entry.crc64nvme):
        return True
    try:
        # From the device: the page cache could hide what the disk has lost.
        return path.stat().st_size == entry.size and crc64_file(path, from_disk=True) == entry.crc64nvme
    except OSError:
        # Not there, or on a bad part of the disk: the store has it, and the fetched file is compared as well.
        return False


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
    gather: Gather,
    allow_step: Callable[[int], bool] | None = None,
    bring: Callable[[CommitManifest, Path], object] | None = None,
) -> Restored | None:
    """Restore the newest checkpoint, called by every process: one decides, all get the same, all fall back together.

    The ``leader`` (rank 0) lists and decides; each process with ``fetches`` (one per node) brings the files to
    ``target/<save_id>``; ``bring(commit, folder)`` does what ``fetch`` does, maybe of fewer files or elsewhere. If any
    of them finds the data damaged, all continue with the commit before it. None: the run has no checkpoint. Raises, on
    all processes alike, ``CheckpointError`` if none is usable and ``StorageError`` if store or disk does not answer.
    """
    bring = bring or partial(fetch, store)
    rejected: list[Rejected] = []
    while True:
        # A commit whose listing is right, but whose bytes arrived wrong on a node, would be chosen again.
        allowed = _without({it.step for it in rejected}, allow_step)
        newest = _decide(partial(find_newest, store, run_id=run_id, allow_step=allowed) if leader else None, gather)
        rejected += newest.rejected
        if newest.commit is None:
            refuse_if_all_rejected(store, rejected)
            return None
        folder = target / newest.commit.save_id
        problem = _fetch_together(partial(bring, newest.commit, folder) if fetches else None, newest.commit, gather)
        if problem is None:
            return Restored(newest.commit, folder, tuple(rejected))
        rejected.append(Rejected(newest.commit.step, problem))


def _without(refused: set[int | None], allow_step: Callable[[int], bool] | None) -> Callable[[int], bool]:
    return lambda step: step not in refused and (allow_step is None or allow_step(step))


def _decide(find_here: Callable[[], Newest] | None, gather: Gather) -> Newest:
    """The leader's finding, or its error, on every process; ``find_here`` is None on the others."""
    found: Newest | None = None
    error: CheckpointError | StorageError | None = None
    try:
        found = find_here() if find_here is not None else None
    # Raised after ``gather``, on all processes: a leader that left now would let the others wait in vain.
    except (CheckpointError, StorageError) as caught:
        error = caught
    reported: list[tuple[Newest | None, CheckpointError | StorageError | None]] = list(gather((found, error)))
    for _, failure in reported:
        if failure is not None:
            raise failure
    return next(newest for newest, _ in reported if newest is not None)


def _fetch_together(bring: Callable[[], object] | None, commit: CommitManifest, gather: Gather) -> str | None:
    """Fetch on every node; the first report of damage, or None if all have their files."""
    damaged: str | None = None
    unanswered: str | None = None
    try:
        if bring is not None:
            bring()
    except CheckpointError as error:
        damaged = str(error)
    except StorageError as error:
        unanswered = str(error)
    outcomes: list[tuple[str | None, str | None]] = list(gather((damaged, unanswered)))
    # Before any damage: a node that could not read has not judged this commit, and to fall back would cost steps.
    for process, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise StorageError(f"restoring {Slot(commit.step)} failed: process {process}: {failure}")
    return next((f"process {process}: {problem}" for process, (problem, _) in enumerate(outcomes) if problem), None)
