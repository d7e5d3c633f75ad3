"""What earlier attempts of a run reported, to contradict a storage that shows none of their checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sm_llm.contract.published import CheckpointPublished

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.contract.run_home import RunHome

_MARK = f'"{CheckpointPublished.kind}"'.encode()


def published_before(home: RunHome) -> int | None:
    """The newest step that the run's record or events report as published; None if they report none.

    Raises ``StorageError`` if the storage does not answer.
    """
    steps = [_newest_step(path) for path in _event_files(home)]
    if home.exists():
        starts = (attempt.start for attempt in home.record().attempts)
        steps += [start.step for start in starts if start is not None and start.source == "checkpoint"]
    return max((step for step in steps if step is not None), default=None)


def _event_files(home: RunHome) -> list[Path]:
    home.refresh("events/")
    return sorted(home.paths.events.glob("attempt-*.jsonl"))


def _newest_step(path: Path) -> int | None:
    """Of one event log; lines that cannot be read count for nothing."""
    steps = []
    with path.open("rb") as stream:
        for line in stream:
            if _MARK in line:
                try:
                    steps.append(int(json.loads(line)["step"]))
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
    return max(steps, default=None)
