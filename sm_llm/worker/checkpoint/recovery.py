"""Times how long training was down after a start that was broken off, and reports it once a step is completed again."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import BEGAN_ENVIRONMENT, QUEUED_ENVIRONMENT
from sm_llm.runs.events.failures import Recovered, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sm_llm.worker.context import WorkerContext


class Recovery:
    """Of one start, on every process; only the leader, which has the event log, reports anything.

    It follows a start of the same attempt that was neither the first nor stopped in order: the platform began it again
    by itself, so that no time counts in which a person did not look.
    """

    def __init__(
        self, context: WorkerContext, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.time
    ) -> None:
        self._context = context
        self._clock = clock
        self._queued, self._began = (_moment(environ.get(it)) for it in (QUEUED_ENVIRONMENT, BEGAN_ENVIRONMENT))
        self._seen = last_sign_of_life(context.earlier_events)
        self._restore_seconds = 0.0
        self._restored = clock()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """What happens in here is a part of the restore."""
        began = self._clock()
        yield
        self._restored = self._clock()
        self._restore_seconds += self._restored - began

    def stepped(self, step: int) -> None:
        """``step``, the first of this start, is completed, on the device as well."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        now, first = self._clock(), self._context.began
        queued, began = self._queued, self._began
        # Clocks of different machines: what is not in order is not known.
        if queued is None or began is None or not seen <= queued <= began <= first:
            queued = began = None
        up = first if began is None else began
        after = now - self._restored
        self._context.emit(
            Recovered(
                step,
                seconds=now - seen,
                down_seconds=up - seen,
                detection_seconds=None if queued is None else queued - seen,
                requeue_seconds=None if queued is None or began is None else began - queued,
                start_seconds=now - up - self._restore_seconds - after,
                restore_seconds=self._restore_seconds,
                first_step_seconds=after,
            )
        )


def last_sign_of_life(events: list[dict[str, object]]) -> float | None:
    """When the start before this one wrote its last event; None without one, or if it was stopped in order."""
    if not events or any(event["kind"] == Stopped.kind for event in _of_last_start(events)):
        return None
    last = events[-1]["time"]
    assert isinstance(last, int | float)
    return float(last)


def _of_last_start(events: list[dict[str, object]]) -> list[dict[str, object]]:
    starts = [index for index, event in enumerate(events) if event["kind"] == "attempt_started"]
    return events[starts[-1] :] if starts else events


def _moment(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
