"""The handle of a run: everything is read from where the run is kept, so that any process can hold one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.backends.base import workflows_of
from sm_llm.launcher.observe.metrics import MetricRow, metric_rows
from sm_llm.runs.events.events import EventWriter, StopRequested
from sm_llm.runs.locate import find_home, launch_folder, with_recorded_options
from sm_llm.runs.results import RESULT_LINK, result_place
from sm_llm.runs.run_paths import STEPS
from sm_llm.spec.backends.table import BACKENDS, options_class
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from typing import Self

    from sm_llm.launcher.backends.base import Backend
    from sm_llm.runs.run_home import RunHome
    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.states import RunState
    from sm_llm.storage.publication.publish import CheckpointInfo

POLL_SECONDS = 0.5


class RunHandle:
    """A run by its address. Cheap to make; every method reads what is true at that moment.

    Methods raise ``StorageError`` when a run's storage does not answer.
    """

    def __init__(self, run: str | Path | RunHome) -> None:
        """``run`` is the run's folder or ``s3://…`` address. Raises ``StorageError`` if there is no run record."""
        home = find_home(run) if isinstance(run, str | Path) else run
        self._created_from: RunRecord = home.record()
        self.home: RunHome = with_recorded_options(home, self._created_from)
        self.continued_attempt: int | None = None
        """Set by ``launch`` when it continued this run instead of starting another."""

    @property
    def root(self) -> Path:
        """The run's folder; of a run in S3 the folder where this machine works on it, or copies what it reads to."""
        return self.home.root

    @property
    def paths(self) -> RunPaths:
        """The places in ``root``, as far as they are there."""
        return self.home.paths

    @property
    def uri(self) -> str:
        return self.home.uri

    @property
    def events(self) -> Path:
        """The folder of the run's events as they are now."""
        self.home.refresh("events/")
        return self.paths.events

    @property
    def id(self) -> str:
        return self._created_from.run_id

    @property
    def record(self) -> RunRecord:
        """The run record as it stands now."""
        return self.home.record()

    @property
    def kind(self) -> str:
        """``train``, ``prepare`` or ``workflow``."""
        spec = self._created_from.spec
        return "workflow" if "steps" in spec else str(spec["task"]["kind"])

    @property
    def steps(self) -> dict[str, Self]:
        """The steps of a workflow that have begun, in order; empty for a job."""
        names = self._created_from.spec.get("steps", {})
        homes = {name: workflows_of(self.backend).step_home(self.home, name) for name in names}
        return {name: type(self)(home) for name, home in homes.items() if home.exists()}

    @property
    def job(self) -> Self:
        """The run whose metrics and result stand for this one: itself, or a workflow's newest step."""
        steps = list(self.steps.values())
        training = [step for step in steps if step.kind == "train"]
        return (training or steps or [self])[-1]

    @property
    def is_local(self) -> bool:
        """Whether it runs on the machine that launched it."""
        options = options_class(self._created_from.spec["backend"])
        return options is not None and options.runs_here

    @property
    def backend(self) -> Backend:
        """Where the run runs."""
        from sm_llm.launcher.backends.registry import backend

        name = self._created_from.spec["backend"]["name"]
        if name not in BACKENDS:
            raise StorageError(f"{self.uri}: its record names the backend {name!r}. Known: {', '.join(BACKENDS)}")
        return backend(name)

    @property
    def launch_folder(self) -> Path | None:
        """The folder that relative inputs are relative to; None if it is gone or nobody but the record names it."""
        return launch_folder(self.home, self._created_from)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every start of the run, oldest first."""
        return self.record.attempts

    @property
    def state(self) -> RunState:
        """The state now."""
        return self.describe()[0]

    def describe(self) -> tuple[RunState, str | None]:
        """The state now and, where there is one, the reason."""
        native = self.backend.describe(self.home)
        return native.state, native.detail or None

    @property
    def native_uri(self) -> str | None:
        """The newest attempt's native job, such as ``local://host/process``; ``attach`` takes it."""
        attempts = self.record.attempts
        return attempts[-1].native_uri(self.backend.name) if attempts else None

    @property
    def cost(self) -> float | None:
        """What the run has cost in US dollars; None where the backend's time is not priced."""
        return self.record.cost

    @property
    def storage(self) -> str:
        """The address of the storage root that holds the run (for a workflow's step: its workflow)."""
        above, _, own = self.uri.rpartition("/")
        workflow, _, folder = above.rpartition("/")
        is_step = folder == STEPS and self.id.endswith(f"-{own}") and find_home(workflow).exists()
        return workflow.rpartition("/")[0] if is_step else above

    @property
    def result(self) -> Path | str | None:
        """What was published (a model, or prepared rows): a folder, or its address in S3. None before it is there."""
        if self.kind != "workflow":
            return result_place(self.home, self.id)
        last = self.steps.get(list(self._created_from.spec["steps"])[-1])
        return None if last is None else last.result

    @property
    def result_link(self) -> Path | str | None:
        """The stable address ``<run>/result`` once there is a result; it stays the same whatever save is committed.

        ``sync``, sources of other jobs and ``TrainingInput`` of the SDK take it, also in S3. A folder without links
        has ``result`` in its place. None before the result is published.
        """
        if self.home.is_remote and self.kind != "workflow":
            return None if self.result is None else f"{self.uri}/{RESULT_LINK}"
        link = self.root / RESULT_LINK
        return link if link.exists() else self.result

    def metrics(self) -> list[MetricRow]:
        """One row per step with exact floats; where attempts overlap, the newest attempt's values.

        ``pandas.DataFrame(run.metrics()).set_index("step")`` is a frame of them: loss, learning_rate, grad_norm,
        validation_loss, tokens_per_second and more. What a step has no value for is missing in its row.
        """
        return metric_rows(self.job.events)

    def checkpoints(self, *, deep: bool = False) -> list[CheckpointInfo]:
        """Every committed checkpoint by ascending step: size in bytes, time, and whether it could be continued from.

        Names and sizes are compared; ``deep`` also reads all the data and compares checksums.
        """
        from sm_llm.storage.publication.publish import list_checkpoints

        job = self.job
        return list_checkpoints(job.home.store, run_id=job.id, deep=deep)

    def stop(self, *, now: bool = False, wait: bool = False) -> RunState:
        """Ask the run to stop after its current step, saving what it can; ``now`` kills it instead.

        ``wait`` returns only when it has ended. Raises ``SubmitError`` if it is not running.
        """
        attempts = self.attempts
        if not attempts or (state := self.state).is_final:
            raise SubmitError(f"{self.id} is not running: it is {self.state.value}")
        self.backend.stop(self.home, attempts[-1], now=now)
        _note_stop(self.job, now=now)
        while wait and not (state := self.state).is_final:
            time.sleep(POLL_SECONDS)
        return state

    def failure_message(self) -> str:
        """How the run ended, the first failing rank with its cause, and where to read on."""
        state, reason = self.describe()
        attempts = self.record.attempts
        rank = attempts[-1].rank if attempts else None
        words = reason or "no reason was given"
        if rank is not None and not words.startswith(f"rank {rank}"):
            words = f"rank {rank}: {words}"
        only = ("--rank", rank) if rank is not None else ()
        return f"{self.id} is {state.value}: {words}. Logs: sm-llm logs {quoted(self.uri, *only, '--tail', 50)}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"


def _note_stop(job: RunHandle, *, now: bool) -> None:
    """Write into the log of the job that runs that it was asked to stop, so that everyone who follows it sees so.

    The log of an attempt in S3 is written, and uploaded, by the machine where it runs. From elsewhere the request
    itself, which lies in S3, is what others see.
    """
    if not job.attempts:
        return
    number = job.attempts[-1].number
    if not job.home.has_originals(number):
        return
    writer = EventWriter(job.paths.event_file(number, "stop"), number)
    writer.write(StopRequested(now))
    writer.close()
