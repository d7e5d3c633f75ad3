"""Atomic publication: many files become one commit, which exists whole or not at all (docs/publication.md).

The parts of the protocol live in ``commit`` (writing), ``find`` (which commit counts), ``restore`` (reading) and
``collect`` (garbage); all of it is offered here, so that a caller knows one name. Nothing in it needs torch: the
job's own channel between processes comes in as a callable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import SmLlmError, StorageError
from sm_llm.storage.base import Gather
from sm_llm.storage.publication.collect import Collected, collect_garbage
from sm_llm.storage.publication.commit import (
    CommitResult,
    commit,
    discard,
    keep,
    new_save,
    seal,
    upload_part,
    write_part,
)
from sm_llm.storage.publication.find import (
    CheckpointInfo,
    Newest,
    Rejected,
    find_final,
    find_newest,
    list_checkpoints,
    verify,
)
from sm_llm.storage.publication.keys import FINAL, Slot
from sm_llm.storage.publication.manifest import CommitManifest, FileEntry, PartManifest, Save
from sm_llm.storage.publication.restore import Restored, fetch, restore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from sm_llm.storage.base import Progress, Store

__all__ = [
    "FINAL",
    "CheckpointInfo",
    "Collected",
    "CommitManifest",
    "CommitResult",
    "FileEntry",
    "Gather",
    "Newest",
    "PartManifest",
    "Rejected",
    "Restored",
    "Save",
    "Slot",
    "collect_garbage",
    "commit",
    "discard",
    "fetch",
    "find_final",
    "find_newest",
    "keep",
    "list_checkpoints",
    "new_save",
    "publish",
    "restore",
    "seal",
    "upload_part",
    "verify",
    "write_part",
]


def publish(
    store: Store,
    save: Save,
    sealed: Path | None,
    *,
    node: int,
    leader: bool,
    gather: Gather,
    meta: Mapping[str, Any] | None = None,
    upload: Callable[..., PartManifest] = upload_part,
    progress: Progress = lambda _: None,
) -> CommitResult:
    """The whole protocol, called by every process: upload, part, outcome, commit, outcome.

    ``sealed`` is the node's sealed folder on the one process that uploads it, None on the others; ``leader`` is true
    on rank 0; ``upload`` does what ``upload_part`` does, maybe elsewhere. Each process takes part in both rounds of
    ``gather`` whatever happens to it, so nobody waits in vain.
    Raises ``StorageError`` on all processes alike if any of them failed: then nothing is committed (or, if the very
    commit was not answered, maybe it is: the data stay). What was stored of a save that certainly has no commit is
    deleted at once; so is a checkpoint whose step was committed by another save. A final result that lost is left to
    the caller (``keep``, ``discard``): of a job that has ended it is all there is.
    """
    _, part_error = _guarded(lambda: _bring_part(store, save, sealed, node, upload, progress) if sealed else None)
    # Round 1: rank 0 must not commit before every part is stored.
    part_errors = gather(_reported(part_error))
    # No commit was tried, so none can turn up later: what is stored is garbage.
    if leader and any(part_errors):
        discard(store, save)
    _raise_first(save, part_errors, part_error)
    result, commit_error = _guarded(lambda: commit(store, save, meta) if leader else None)
    # Round 2: a sealed folder may be deleted only once its process knows how the commit ended.
    outcomes: list[tuple[CommitResult | None, str | None]] = list(gather((result, _reported(commit_error))))
    # Nothing is deleted on this path: a commit that was not answered may still turn up and name these files.
    _raise_first(save, [error for _, error in outcomes], commit_error)
    published = next(published for published, _ in outcomes if published is not None)
    is_lost = published.commit is not None and published.commit.save_id != save.save_id
    # Another save holds the slot. If its commit cannot be read (None), it might name our files, so they stay.
    if leader and is_lost and save.step is not None:
        discard(store, save)
    return published


def _bring_part(
    store: Store, save: Save, sealed: Path, node: int, upload: Callable[..., PartManifest], progress: Progress
) -> None:
    write_part(store, upload(store, save, sealed, node, progress=progress))


def _guarded(action: Callable[[], Any]) -> tuple[Any, Exception | None]:
    # Everything is caught, our own mistakes too: the other processes wait for this one's word.
    try:
        return action(), None
    except Exception as error:
        return None, error


def _reported(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, SmLlmError | OSError) else f"{type(error).__name__}: {error}"


def _raise_first(save: Save, errors: Sequence[str | None], own: Exception | None) -> None:
    for process, error in enumerate(errors):
        if error is not None:
            raise StorageError(f"{save.slot} was not published: process {process}: {error}") from own
