"""What earlier attempts of a run reported, to contradict a storage that shows none of their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.runs.events.events import event_files, read_file
from sm_llm.runs.events.published import CheckpointPublished

if TYPE_CHECKING:
    from sm_llm.runs.run_home import RunHome


def published_before(home: RunHome) -> int | None:
    """The newest step that the run's record or events report as published; None if they report none.

    Raises ``StorageError`` if the storage does not answer.
    """
    home.refresh("events/")
    events = (event for _, _, path in event_files(home.paths.events) for _, event in read_file(path))
    steps = [event["step"] for event in events if event["kind"] == CheckpointPublished.kind]
    if home.exists():
        # An attempt that continued a checkpoint proves that there was one, even where its events were lost.
        starts = (attempt.start for attempt in home.record().attempts)
        steps += [start.step for start in starts if start is not None and start.source == "checkpoint"]
    return max(steps, default=None)
