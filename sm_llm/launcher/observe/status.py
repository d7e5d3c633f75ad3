"""What a run is doing now, as one value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sm_llm.runs.events.events import read_events
from sm_llm.runs.events.run_metrics import Summary, summarise, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.runs.run_states import RunState


@dataclass(frozen=True)
class Status:
    """What a run is doing now. Times in seconds since the epoch; ``progress`` is that of the newest attempt."""

    run_id: str
    uri: str
    kind: str
    """``train``, ``prepare`` or ``workflow``."""
    state: RunState
    reason: str | None
    attempt: int
    native_id: str | None
    native_uri: str | None
    """The newest attempt's native job; ``attach`` takes it."""
    started: float | None
    ended: float | None
    """None while it runs."""
    progress: Summary
    result: str | None
    trackers: dict[str, str]
    """Experiment tracker -> where it shows this run."""
    cost: float | None
    """In US dollars; None where it is not priced."""
    billable_seconds: int | None = None
    """Seconds that the platform bills for all attempts that have ended, of all nodes together; None without a bill."""
    dropped_changes: str = ""
    """Which changes of the newest attempt the run has not kept, since it ended before its first step."""
    used_seconds: int | None = None
    """Seconds that those nodes ran; where spot made it cheaper, more than what is billed."""
    steps: tuple[Status, ...] = ()
    """Of a workflow: the steps that have begun."""

    def to_json(self) -> dict[str, Any]:
        """The status as JSON values; a loss that is not a number, which JSON lacks, is text."""
        value = asdict(self)
        value["progress"] = to_json(value["progress"])
        value["steps"] = [step.to_json() for step in self.steps]
        return value


def status_of(run: RunHandle) -> Status:
    """The status, from the record, the lock and the events."""
    state, reason = run.describe()
    record = run.record
    last = record.attempts[-1] if record.attempts else None
    result = run.result
    events = list(read_events(run.job.events))
    opened = [event for event in events if event["kind"] == "tracker_opened"]
    progress = summarise(events)
    # A request that the job has not read yet is in the store, but in no event.
    if last is not None and not state.is_final and _is_asked_to_stop(run, last.number):
        progress = replace(progress, stopping=True)
    return Status(
        run_id=run.id,
        uri=run.uri,
        kind=run.kind,
        state=state,
        reason=reason,
        attempt=last.number if last else 0,
        native_id=last.native_id if last else None,
        native_uri=run.native_uri,
        started=last.started if last else None,
        ended=last.ended if last else None,
        progress=progress,
        result=None if result is None else str(result),
        trackers={event["tracker"]: event["uri"] or event["id"] for event in opened},
        cost=record.cost,
        dropped_changes=last.dropped_sentence if last else "",
        billable_seconds=_sum(it.billable_seconds for it in record.attempts),
        # Only of attempts that have a bill, because the two sums are compared.
        used_seconds=_sum(it.used_seconds for it in record.attempts if it.billable_seconds is not None),
        steps=tuple(status_of(step) for step in run.steps.values()),
    )


def _is_asked_to_stop(run: RunHandle, attempt: int) -> bool:
    """Whether a request to stop waits for the attempt, or for the newest step's, which has not seen it yet."""
    asked = [(run.run_store, attempt), *((it.run_store, it.attempts[-1].number) for it in (run.job,) if it.attempts)]
    return any(run_store.is_asked_to_stop(number) for run_store, number in asked)


def _sum(amounts: Iterable[int | None]) -> int | None:
    known = [it for it in amounts if it is not None]
    return sum(known) if known else None
