"""The handle of a run: what is read from its storage, and what the platform knows where it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.launcher.backend import workflows_of
from sm_llm.runs.events.run_metrics import MetricRow, metric_rows
from sm_llm.runs.reader import RunReader
from sm_llm.spec.backends.table import BACKENDS, options_class
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.backend import Backend
    from sm_llm.runs.run_states import RunState
    from sm_llm.runs.run_store import RunStore

POLL_SECONDS = 0.5


class RunHandle(RunReader):
    """A run by its address, with the place where it runs. Cheap to make.

    Methods raise ``StorageError`` when a run's storage does not answer.
    """

    def __init__(self, run: str | Path | RunStore) -> None:
        """``run`` is the run's folder or ``s3://…`` address. Raises ``StorageError`` if there is no run record."""
        super().__init__(run)
        # Set by ``launch`` when it continued this run instead of starting another.
        self.continued_attempt: int | None = None
        # Step of the workflow (empty for a job) -> settings and warnings of the plan that it then continues with.
        self.continued_plans: dict[str, dict[str, Any]] = {}

    @property
    def is_local(self) -> bool:
        """Whether it runs on the machine that launched it."""
        options = options_class(self._created_from.spec["backend"])
        # None where the record names a backend that this release does not know.
        return options is not None and options.runs_here

    @property
    def backend(self) -> Backend:
        """Where the run runs."""
        from sm_llm.launcher.backend import backend

        name = self._created_from.spec["backend"]["name"]
        if name not in BACKENDS:
            raise StorageError(f"{self.uri}: its record names the backend {name!r}. Known: {', '.join(BACKENDS)}")
        return backend(name)

    def describe(self) -> tuple[RunState, str | None]:
        """The state now and, where there is one, the reason."""
        native = self.backend.describe(self.run_store)
        return native.state, native.detail or None

    def step_run_store(self, step: str) -> RunStore:
        """Where a step of this workflow has its own run, whether it has begun or not."""
        return workflows_of(self.backend).step_run_store(self.run_store, step)

    @property
    def native_uri(self) -> str | None:
        """The newest attempt's native job, such as ``local://host/process``; ``attach`` takes it."""
        attempts = self.record.attempts
        return attempts[-1].native_uri(self.backend.name) if attempts else None

    def metrics(self) -> list[MetricRow]:
        """One row per step with exact floats; where attempts overlap, the newest attempt's values.

        ``pandas.DataFrame(run.metrics()).set_index("step")`` is a frame of them: loss, learning_rate, grad_norm,
        validation_loss, tokens_per_second and more. What a step has no value for is missing in its row.
        """
        return metric_rows(self.job.events)

    def failure_message(self) -> str:
        """How the run ended, the first failing rank with its cause, and where to read on."""
        state, reason = self.describe()
        attempts = self.record.attempts
        rank = attempts[-1].rank if attempts else None
        words = reason or "no reason was given"
        # The reason that a worker gives often begins with its rank.
        if rank is not None and not words.startswith(f"rank {rank}"):
            words = f"rank {rank}: {words}"
        only = ("--rank", rank) if rank is not None else ()
        if dropped := attempts[-1].dropped_sentence if attempts else "":
            words = f"{words.rstrip('.')}. {dropped[0].upper()}{dropped[1:]}"
        return f"{self.id} is {state.value}: {words}. Logs: sm-llm logs {quoted(self.uri, *only, '--tail', 50)}"
