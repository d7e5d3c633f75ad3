"""What backends have in common whose platform runs one job per attempt and finds it by its native id.

What only a run needs is imported where it is used: a plan needs none of it.
"""

from __future__ import annotations

import re
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from sm_llm.launcher.backend import Backend, NativeJob, NativeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore

POLL_SECONDS = 5.0
"""Between two reads of the lines of a job that runs."""


class JobBackend(Backend):
    """A backend but for what its platform alone knows: a subclass decides, renders, submits and stops.

    It answers for a job by its native id (``job_state``, ``job_lines``, ``run_of``), and overrides what its platform
    does in another way.
    """

    native_forms: ClassVar[tuple[str, ...]] = ()
    """Regular expressions of what the platform itself calls a job, e.g. an ARN; their one group is the native id."""

    def job_state(self, native_id: str) -> NativeState:
        """The state of a job, and the platform's own word for it. Raises ``SubmitError`` without an answer."""
        raise NotImplementedError(f"{self.name} knows no states of jobs")

    def job_lines(self, native_id: str) -> Sequence[str]:
        """Every line that a job has printed so far, rank 0's node first."""
        raise NotImplementedError(f"{self.name} keeps no logs of jobs")

    def run_of(self, native_id: str) -> str | None:
        """The address of the run as the job itself holds it; None where the job is gone or holds none."""
        return None

    def check_start(self, submission: Submission | None) -> None:
        """Raise ``SubmitError`` for what the platform would refuse now. A workflow has no ``submission``."""

    @contextmanager
    def starting(self, home: RunStore, number: int, submission: Submission | None) -> Iterator[Attempt]:
        """The earlier attempt has ended and the platform can start the next, whose native id is not known yet."""
        from sm_llm.launcher.submission import assert_ended
        from sm_llm.runs.run_paths import RunPaths
        from sm_llm.runs.run_record import Attempt

        assert_ended(self, home)
        self.check_start(submission)
        yield Attempt.claim(number, request=RunPaths.request_key(number))

    def describe(self, home: RunStore) -> NativeState:
        """The state of the run's newest job. One that has ended is settled in the run's record."""
        from sm_llm.runs.outcome import recorded_end, unstarted
        from sm_llm.runs.run_states import RunState

        record = home.record()
        if (end := recorded_end(record)) is not None:
            return NativeState.of(end)
        if not record.attempts or record.attempts[-1].is_claim:
            return NativeState(RunState.PENDING, unstarted(record, time.time()))
        return self.open_state(home, record)

    def open_state(self, home: RunStore, record: RunRecord) -> NativeState:
        """``describe`` where the newest attempt in ``record`` has a job and no end yet."""
        from sm_llm.launcher.attempt_outcome import Evidence, failures_in_events, first_failure, record_evidence

        last = record.attempts[-1]
        native = self.job_state(last.native_id)
        if not native.state.is_final:
            return native
        # The events hold the cause, so they are brought here before the attempt is judged.
        home.refresh(f"events/attempt-{last.number}-")
        failure = first_failure(failures_in_events(home.paths, last.number))
        found = Evidence(native.state, native.detail, failure=failure)
        return NativeState.of(record_evidence(home, record, last, found))

    def logs(self, home: RunStore, attempt: int, wanted: LogFilter, still_running: Callable[[], bool]) -> Iterator[str]:
        """Wanted lines of ``job_lines``; then new ones while ``still_running``."""
        held = home.record().attempt(attempt)
        assert held is not None
        shown: int | None = None
        while True:
            alive = still_running()  # asked before the rest, so that the last lines are never missed
            lines = self.job_lines(held.native_id)
            taken = [line for line in map(wanted.take, lines[shown or 0 :]) if line is not None]
            yield from taken if shown is not None or wanted.tail is None else taken[len(taken) - wanted.tail :]
            shown = len(lines)
            if not alive:
                return
            time.sleep(POLL_SECONDS)

    def parse_native(self, text: str) -> NativeJob | None:
        """``NAME://ID``, or one of ``native_forms``."""
        forms = (f"{re.escape(self.name)}://(.+)", *self.native_forms)
        match = next((it for it in (re.fullmatch(form, text) for form in forms) if it is not None), None)
        return None if match is None else NativeJob(f"{self.name}://{match[1]}", partial(self.run_of, match[1]))
