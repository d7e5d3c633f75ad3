"""Follows a run's events while they are written, across the steps of a workflow."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from sm_llm.errors import QueryError, StorageError
from sm_llm.launcher.observe.retry_policy import RetryPolicy
from sm_llm.runs.events.events import event_files, read_file
from sm_llm.runs.outcome import NEVER_STARTED
from sm_llm.runs.run_states import RunState
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.runs.run_record import Attempt
    from sm_llm.runs.run_store import RunStore

STATE_SECONDS = 1.0


class EventTail:
    """New events of one run since the last look, from attempt ``first_attempt`` on."""

    def __init__(self, run_store: RunStore, first_attempt: int) -> None:
        self._run_store = run_store
        self._first_attempt = first_attempt
        self._offsets: dict[Path, int] = {}

    def new_events(self) -> Iterator[dict[str, Any]]:
        """Events written since the last call, file by file."""
        self._run_store.refresh(f"events/attempt-{self._first_attempt}-")
        for attempt, _, path in event_files(self._run_store.paths.events):
            if attempt >= self._first_attempt:
                for offset, event in read_file(path, self._offsets.get(path, 0)):
                    self._offsets[path] = offset
                    yield event


def follow(
    run: RunHandle, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[RunHandle, Mapping[str, Any]] | None]:
    """Every event of the newest attempt with the job it belongs to, until the run has ended; None between polls.

    A store or platform that does not answer for a while is reported as a notice.
    """
    tails: dict[str, tuple[RunHandle, EventTail]] = {}
    pause, retries = run.run_store.poll_seconds, RetryPolicy(run.run_store)
    for poll in itertools.count():
        # Asked before reading, so that the last events are never missed; and seldom, for it reads the whole record.
        asks = poll % max(1, round(STATE_SECONDS / pause)) == 0
        ended = False
        issue: StorageError | QueryError | None = None
        try:
            ended = asks and run.state.is_final
            if asks:
                _begin_tails(run, tails)
        except (StorageError, QueryError) as error:
            issue = error
        try:  # all the same: of a run on this machine the events are here, its alarms too
            for job, tail in tails.values():
                for event in tail.new_events():
                    yield job, event
        except StorageError as error:
            ended, issue = False, error
        reported = retries.settle() if issue is None else retries.bear(issue)
        if reported is not None:
            yield run, _notice(reported)
        yield None
        if ended:
            return
        sleep(pause)


def _notice(message: str) -> dict[str, Any]:
    return {"kind": "notice", "time": time.time(), "message": message, "level": "warning"}


def _begin_tails(run: RunHandle, tails: dict[str, tuple[RunHandle, EventTail]]) -> None:
    # A job has one event log, known from the start; steps of a workflow begin one after the other.
    if tails and run.kind != "workflow":
        return
    for job in _jobs_of_newest_attempt(run):
        if job.uri not in tails:
            tails[job.uri] = (job, EventTail(job.run_store, job.attempts[-1].number))


def _jobs_of_newest_attempt(run: RunHandle) -> list[RunHandle]:
    """The run itself, or the steps that this attempt of the workflow has begun (not those finished before)."""
    attempts = run.attempts
    if not attempts:
        return []
    if run.kind != "workflow":
        return [run]
    return [step for step in run.steps.values() if has_begun_in(attempts[-1], step)]


def has_begun_in(attempt: Attempt, step: RunHandle) -> bool:
    """Whether this attempt of a workflow has begun the step; one that was finished before, it has not."""
    own = step.attempts
    return bool(own) and own[-1].started >= attempt.started


def final_state(run: RunHandle, pause: float, sleep: Callable[[float], None]) -> RunState:
    """Wait, in ``pause`` seconds, until ``run`` has ended, or nobody is about to start it.

    Only a state that is not known is printed, once for each reason: it may stay so for good.
    """
    retries = RetryPolicy(run.run_store)
    printed: str | None = None
    while True:
        try:
            state, reason = run.describe()
        except (StorageError, QueryError) as issue:
            retries.bear(issue)
        else:
            retries.settle()
            if state.is_final or (state is RunState.PENDING and reason == NEVER_STARTED):
                return state
            if state is RunState.UNKNOWN and printed != (printed := reason or state.value):
                echo(f"{run.id}: {printed}. Its state is not known; still waiting", err=True)
        sleep(pause)
