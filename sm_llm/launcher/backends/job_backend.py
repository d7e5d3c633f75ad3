"""What backends have in common whose platform runs one job per attempt and finds it by its native id.

What only a run needs is imported where it is used: a plan needs none of it.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sm_llm.launcher.backend import Backend, NativeState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backend import Submission
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore


class JobBackend(Backend):
    """A backend but for what its platform alone knows: a subclass has the other methods, and ``open_state``."""

    @abstractmethod
    def open_state(self, run_store: RunStore, record: RunRecord) -> NativeState:
        """``describe`` where the newest attempt in ``record`` has a job and no end yet.

        A job that has ended is settled by ``attempt_outcome.record_end``, once its events were brought by ``refresh``.
        """

    def check_start(self, submission: Submission | None) -> None:
        """Raise ``SubmitError`` for what the platform would refuse now. A workflow has no ``submission``."""

    @contextmanager
    def starting(self, run_store: RunStore, number: int, submission: Submission | None) -> Iterator[Attempt]:
        """The earlier attempt has ended and the platform can start the next, whose native id is not known yet."""
        from sm_llm.launcher.submission import assert_ended
        from sm_llm.runs.run_paths import RunPaths
        from sm_llm.runs.run_record import Attempt

        assert_ended(self, run_store)
        self.check_start(submission)
        yield Attempt.claim(number, request=RunPaths.request_key(number))

    def describe(self, run_store: RunStore) -> NativeState:
        """The state of the run's newest job. One that has ended is settled in the run's record."""
        from sm_llm.runs.outcome import recorded_end, unstarted
        from sm_llm.runs.run_states import RunState

        record = run_store.record()
        if (end := recorded_end(record)) is not None:
            return NativeState.of(end)
        if not record.attempts:
            return NativeState(RunState.PENDING, unstarted(record, time.time()))
        return (self.claim_state if record.attempts[-1].is_claim else self.open_state)(run_store, record)

    def claim_state(self, run_store: RunStore, record: RunRecord) -> NativeState:
        """``describe`` where the newest attempt in ``record`` is claimed and its job is not known."""
        from sm_llm.runs.outcome import unstarted
        from sm_llm.runs.run_states import RunState

        return NativeState(RunState.PENDING, unstarted(record, time.time()))
