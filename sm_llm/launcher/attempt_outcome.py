"""How an attempt ended, by one rule for every backend, and the change of its run's record that settles it.

What was published decides first, then what the processes report, then what their platform saw: exit codes and job
states lose whose fault it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.contract.failure import Cause, Failure
from sm_llm.runs.events.events import event_files, read_file
from sm_llm.runs.events.failures import Failed
from sm_llm.runs.outcome import Outcome, has_worked, nothing_done, with_end
from sm_llm.runs.results import has_checkpoint, has_final, link_result, result_location
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore

# A process that fails has a log of its own, so that it never waits for another's.
_FAILURE_LOG = re.compile(r"rank[0-9]+-failure")


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt that has ended, beside what it has published."""

    state: RunState
    """What its platform saw: completed (its processes ended without an error), failed, stopped, or
    interrupted-resumable for a limit of time."""
    detail: str = ""
    """The platform's words for it."""
    rank: int | None = None
    """The failing rank, where the platform knows it."""
    failure: Failure | None = None
    """The first failure that a process reported."""
    stop: str | None = None
    """Why its processes reported to stop, if they did."""
    since: float = 0.0
    """Seconds since the epoch: events from before are those of an earlier job of the same attempt."""


def judge(run_store: RunStore, run_id: str, number: int, found: Evidence) -> Outcome:
    """How attempt ``number`` ended. Raises ``StorageError`` if the run's storage does not answer."""
    # The result is what a run is for: no exit code, signal or job state from after its publication undoes it.
    if has_final(run_store, run_id):
        return completed(run_store.paths, number, found.since)
    # Its processes ended well, but a result that is not committed may be half a result.
    if found.state is RunState.COMPLETED:
        return Outcome(RunState.COMPLETED_UNPUBLISHED, "ended without an error, but published no result")
    if found.state is RunState.FAILED:
        # A rank that only lost its peer does not know why: the platform's words may name a killed process.
        if found.failure is not None and not found.failure.cause.is_consequence:
            return Outcome(RunState.FAILED, found.failure.headline, found.failure.rank)
        # A stop that was asked for, and that the platform calls a failure, is judged below as a stop.
        if found.stop is None:
            return Outcome(RunState.FAILED, found.detail, found.rank)
    # A platform calls a stop by its signal a failure: then the processes' own words are the better ones.
    reason = found.stop if found.state is RunState.FAILED else found.detail
    return stopped(run_store, run_id, reason or "")


def stopped(run_store: RunStore, run_id: str, reason: str = "") -> Outcome:
    """An attempt that ended on request, or that its platform ended: resumable where there is a checkpoint."""
    # Asked of the store and not of the events: what is published there is what the next attempt finds.
    resumable = has_checkpoint(run_store, run_id)
    usual = "asked to stop; the newest checkpoint is safe" if resumable else "asked to stop before the first checkpoint"
    return Outcome(RunState.stopped(resumable=resumable), reason or usual)


def completed(paths: RunPaths, attempt: int, since: float = 0.0) -> Outcome:
    """How an attempt ended whose run has a result: by its work, or without any, where the result was there before."""
    # Only rank 0's log: whether there was anything to do is decided once for all processes.
    log = paths.event_file(attempt, "rank0")
    events = (event for _, event in read_file(log)) if log.is_file() else iter(())
    reason = nothing_done(it for it in events if it["time"] >= since)
    return Outcome(RunState.COMPLETED) if reason is None else Outcome(RunState.UNCHANGED, reason)


def record_outcome(
    run_store: RunStore, attempt: Attempt, outcome: Outcome, *, steps: Iterable[RunStore] | None = None,
    bill: Mapping[str, int | None] | None = None,
) -> Outcome:  # fmt: skip
    """Write how an attempt ended into the record, once and for all; returns ``outcome``.

    ``steps`` are the runs of a workflow's steps. Nothing is written where the attempt has an end already, or where
    another attempt, or job, has taken its place meanwhile.
    """
    worked = steps is not None and run_store.record().before is not None and steps_have_worked(steps, attempt)
    run_store.update(lambda held: with_end(held, run_store.paths, attempt, outcome, bill, steps_worked=worked))
    return outcome


def steps_have_worked(steps: Iterable[RunStore], attempt: Attempt) -> bool:
    """Whether one of a workflow's steps has worked since this ``attempt`` of the workflow began."""
    for step in steps:
        own = step.record().attempts if step.exists() else ()
        # One that had its result before was not begun again.
        if own and (own[-1].ended or own[-1].started) >= attempt.started:
            step.refresh(f"events/attempt-{own[-1].number}-")
            if has_worked(step.paths, own[-1]):
                return True
    return False


def record_evidence(run_store: RunStore, record: RunRecord, attempt: Attempt, found: Evidence) -> Outcome:
    """Judge an attempt that has ended, and write its end into the record; a result in a folder gets its address."""
    outcome = judge(run_store, record.run_id, attempt.number, found)
    if outcome.state.is_completed and not run_store.is_remote:
        link_result(run_store, result_location(run_store, record.run_id))
    return record_outcome(run_store, attempt, outcome)


def record_end(
    run_store: RunStore, record: RunRecord, state: RunState, detail: str = "", stop: str | None = None
) -> Outcome:
    """The same for the newest attempt, whose events are in the run's folder, from what its platform reports of it.

    ``stop``: why its processes reported to stop, if they did.
    """
    last = record.attempts[-1]
    failure = first_failure(failures_in_events(run_store.paths, last.number))
    return record_evidence(run_store, record, last, Evidence(state, detail, failure=failure, stop=stop))


def first_failure(found: Iterable[tuple[float, Failure]]) -> Failure | None:
    """Of failures with their times the one to report: a cause comes before a consequence, then whoever was first."""
    ranked = [(failure.cause.is_consequence, at, failure) for at, failure in found]
    # Failures have no order of their own, so the key leaves them out.
    return min(ranked, key=lambda item: item[:2])[2] if ranked else None


def failures_in_events(paths: RunPaths, attempt: int) -> Iterator[tuple[float, Failure]]:
    """Every failure that a process of an attempt has logged as an event, with its time in seconds since the epoch."""
    for number, writer, log in event_files(paths.events):
        if number == attempt and _FAILURE_LOG.fullmatch(writer):
            for event in (it for _, it in read_file(log) if it["kind"] == Failed.kind):
                # The event of another release may name a cause that this one does not know.
                cause = Cause(event["cause"]) if event["cause"] in list(Cause) else Cause.OTHER
                yield event["time"], Failure(cause, event["message"], event["rank"], event["node"])
