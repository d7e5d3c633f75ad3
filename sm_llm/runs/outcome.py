"""How an attempt ended, and what the run's record keeps of that: pure changes of the record."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.runs.events.events import event_files, read_file
from sm_llm.runs.run_record import AttemptStart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_states import RunState

STARTING_SECONDS = 240.0
"""So long a launcher may need from a run's record, or its claim of an attempt, to the job: all tries of its calls."""
NEVER_STARTED = "was never started"
_KEPT = ("start_chosen", "tracker_opened")
# What an attempt was started for: a step, or what a program, a preparation or an export hands over.
_WORK = frozenset(
    {"first_step", "step", "logged", "checkpoint_published", "account", "final_published", "nothing_done"}
)


@dataclass(frozen=True)
class Outcome:
    """The final state of an attempt, the reason, and the first failing rank."""

    state: RunState
    reason: str | None = None
    rank: int | None = None


def recorded_end(record: RunRecord) -> Outcome | None:
    """How the newest attempt ended; None if nobody has recorded an end yet."""
    last = record.attempts[-1] if record.attempts else None
    if last is None or last.state is None or not last.state.is_final:
        return None
    return Outcome(last.state, last.reason, last.rank)


def unstarted(record: RunRecord, now: float) -> str:
    """Why a run waits that has no job, in words; ``NEVER_STARTED`` where nobody is about to start it."""
    if record.in_pipeline and not record.attempts:
        return "its pipeline has not started it yet"
    # The time is another machine's, whose clock may be ahead: hence the absolute difference below.
    since = record.attempts[-1].started if record.attempts else record.created
    return "is being started" if abs(now - since) < STARTING_SECONDS else NEVER_STARTED


def has_worked(paths: RunPaths, attempt: Attempt) -> bool:
    """Whether an attempt has taken a step, or published or logged something."""
    logs = (log for number, _, log in event_files(paths.events) if number == attempt.number)
    return any(event["kind"] in _WORK for log in logs for _, event in read_file(log))


def nothing_done(events: Iterable[Mapping[str, Any]]) -> str | None:
    """Why an attempt did nothing, by its events; None where it has worked.

    One whose processes were started again after they had published has worked: the second time reports the same result.
    """
    found = list(events)
    kinds = Counter(event["kind"] for event in found)
    reasons = [str(event["reason"]) for event in found if event["kind"] == "nothing_done"]
    # Each time that there is nothing to do, the result is reported once.
    has_published = kinds["final_published"] > len(reasons)
    has_worked = any(kinds[kind] for kind in _WORK - {"final_published", "nothing_done"})
    return None if has_published or has_worked or not reasons else reasons[0]


def with_end(
    record: RunRecord, paths: RunPaths, attempt: Attempt, outcome: Outcome,
    bill: Mapping[str, int | None] | None = None, *, steps_worked: bool = False,
) -> RunRecord:  # fmt: skip
    """The record with ``attempt`` ended: how, where its training began, the trackers it opened, the ``bill``.

    Changes that it was resumed with stay only if it has worked with them; ``steps_worked``: of a workflow, a step has.
    As it is where that attempt has its end already, was rolled back, or is another job's by now.
    """
    # Whoever settles may have looked long ago: meanwhile another process has settled, or another launch has begun.
    if not attempt.is_open_in(record):
        return record
    # From the record and not from the argument, which may be older.
    held = next(it for it in record.attempts if it.number == attempt.number)
    update: dict[str, Any] = {
        "ended": time.time(), "state": outcome.state, "reason": outcome.reason, "rank": outcome.rank, **(bill or {})
    }  # fmt: skip
    trackers = dict(record.trackers)
    # Only a worker knows these, and it may not write the record while its launcher does.
    for event in _kept_events(paths, attempt.number):
        if event["kind"] == "start_chosen":
            update["start"] = AttemptStart(**{name: event[name] for name in AttemptStart.model_fields})
        else:
            trackers[event["tracker"]] = event["id"]
    ended = record.with_attempt(held.model_copy(update=update)).model_copy(update={"trackers": trackers})
    if record.before is None:
        return ended
    # Changes that nothing was done with must not stay: what made this attempt fail would fail every later one.
    kept = outcome.state.is_completed or steps_worked or has_worked(paths, attempt)
    return ended.settled(attempt.number, kept=kept)


def _kept_events(paths: RunPaths, number: int) -> Iterator[Mapping[str, Any]]:
    log = paths.event_file(number, "rank0")
    return (event for _, event in (read_file(log) if log.is_file() else ()) if event["kind"] in _KEPT)
