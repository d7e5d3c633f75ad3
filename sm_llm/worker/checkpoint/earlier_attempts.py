"""What earlier attempts of a run reported, to contradict a storage that shows none of their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import CheckpointError, StorageError
from sm_llm.runs.events.checkpoints import CheckpointPublished
from sm_llm.runs.events.events import event_files, read_file
from sm_llm.storage.publication.retire import retired_steps

if TYPE_CHECKING:
    from sm_llm.runs.run_store import RunStore
    from sm_llm.storage.base import Gather, Store
    from sm_llm.worker.context import WorkerContext


def refuse_to_forget(context: WorkerContext, store: Store, gather: Gather, *, anew: str) -> None:
    """Raise ``CheckpointError`` if an earlier attempt published; the caller found no checkpoint at all in ``store``.

    A checkpoint that was quarantined, so that the run starts from step 0, is not lost. Called by every process of
    ``gather``: rank 0 reads, all raise alike. ``anew`` is how the user begins from step 0 on purpose. Raises
    ``StorageError`` if the storage does not answer.
    """
    step, problem = None, None
    if context.process.is_leader:
        try:
            step = published_before(job_run_store(context.job))
            step = None if step in retired_steps(store) else step
        except StorageError as error:
            problem = str(error)
    # No commit in the listing although one was published: a wrong or emptied storage, not a new run.
    for published, unread in gather((step, problem)):
        if unread is not None:
            raise StorageError(f"earlier attempts of the run could not be read: {unread}")
        if published is not None:
            raise CheckpointError(
                f"an earlier attempt published step {published}, but {store.uri} shows no checkpoint. Nothing was "
                f"started. Bring ckpt/ back, or begin anew with {anew}"
            )


def published_before(run_store: RunStore) -> int | None:
    """The newest step that the run's record or events report as published; None if they report none.

    Raises ``StorageError`` if the storage does not answer.
    """
    run_store.refresh("events/")
    events = (event for _, _, path in event_files(run_store.paths.events) for _, event in read_file(path))
    steps = [event["step"] for event in events if event["kind"] == CheckpointPublished.kind]
    if run_store.exists():
        # An attempt that continued a checkpoint proves that there was one, even where its events were lost.
        starts = (attempt.start for attempt in run_store.record().attempts)
        steps += [start.step for start in starts if start is not None and start.source == "checkpoint"]
    return max(steps, default=None)
