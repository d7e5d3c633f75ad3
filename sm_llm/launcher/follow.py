"""Follows a run's events while they are written, across the steps of a workflow."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from sm_llm.contract.events import event_files, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sm_llm.launcher.run import Run

POLL_SECONDS = 0.2
LOOKS_PER_STATE = 5


class EventTail:
    """New events of one run since the last look, from attempt ``first_attempt`` on."""

    def __init__(self, folder: Path, first_attempt: int) -> None:
        self._folder = folder
        self._first_attempt = first_attempt
        self._offsets: dict[Path, int] = {}

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Events written since the last call, file by file."""
        for attempt, _, path in event_files(self._folder):
            if attempt >= self._first_attempt:
                for offset, event in read_file(path, self._offsets.get(path, 0)):
                    self._offsets[path] = offset
                    yield event


def follow(
    run: Run, *, poll: float = POLL_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Run, Mapping[str, Any]] | None]:
    """Every event of the newest attempt with the job it belongs to, until the run has ended; None between looks."""
    tails: dict[str, tuple[Run, EventTail]] = {}
    for look in itertools.count():
        # Asked before reading, so that the last events are never missed; and seldom, for it reads the whole record.
        ended = look % LOOKS_PER_STATE == 0 and run.state.is_final
        for job in _jobs_of_newest_attempt(run) if look % LOOKS_PER_STATE == 0 else ():
            if job.uri not in tails:
                tails[job.uri] = (job, EventTail(job.paths.events, job.attempts[-1].number))
        for job, tail in tails.values():
            for event in tail.new_events():
                yield job, event
        yield None
        if ended:
            return
        sleep(poll)


def _jobs_of_newest_attempt(run: Run) -> list[Run]:
    """The run itself, or the steps that this attempt of the workflow has begun (not those finished before)."""
    attempts = run.attempts
    if not attempts:
        return []
    if run.kind != "workflow":
        return [run]
    steps = (step for step in run.steps.values() if step.attempts)
    return [step for step in steps if step.attempts[-1].started >= attempts[-1].started]
