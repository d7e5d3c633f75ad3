"""The handle of a run: everything is read from where the run is kept, so that any process can hold one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.run_paths import STEPS
from sm_llm.errors import RunFailed, SubmitError
from sm_llm.launcher.follow import note_stop
from sm_llm.launcher.homes import find_home, launch_folder, with_recorded_options
from sm_llm.launcher.metrics import MetricRow, metric_rows
from sm_llm.launcher.results import RESULT_LINK, result_place
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.contract.run_home import RunHome
    from sm_llm.contract.run_paths import RunPaths
    from sm_llm.contract.run_record import Attempt, RunRecord
    from sm_llm.contract.states import RunState
    from sm_llm.launcher.backends.base import Backend
    from sm_llm.launcher.status import Status
    from sm_llm.spec.overrides import Override
    from sm_llm.storage.publish import CheckpointInfo

POLL_SECONDS = 0.5


class Run:
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
    def steps(self) -> dict[str, Run]:
        """The steps of a workflow that have begun, in order; empty for a job."""
        names = self._created_from.spec.get("steps", {})
        homes = {name: self.backend.step_home(self.home, name) for name in names}
        return {name: Run(home) for name, home in homes.items() if home.exists()}

    @property
    def job(self) -> Run:
        """The run whose metrics and result stand for this one: itself, or a workflow's newest step."""
        steps = list(self.steps.values())
        training = [step for step in steps if step.kind == "train"]
        return (training or steps or [self])[-1]

    @property
    def is_local(self) -> bool:
        """Whether it runs on the machine that launched it."""
        return bool(self._created_from.spec["backend"]["name"] == "local")

    @property
    def backend(self) -> Backend:
        """Where the run runs."""
        from sm_llm.launcher.backends.registry import backend

        return backend(str(self._created_from.spec["backend"]["name"]))

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
        return self.backend.native_uri(attempts[-1]) if attempts else None

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

    def status(self) -> Status:
        """State, progress and result, from the record, the lock and the events."""
        from sm_llm.launcher.status import status_of

        return status_of(self)

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
        from sm_llm.storage.publish import list_checkpoints

        job = self.job
        return list_checkpoints(job.home.store, run_id=job.id, deep=deep)

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        node: int | None = None,
        rank: int | None = None,
        pattern: str | None = None,
        attempt: int | None = None,
        raw: bool = False,
    ) -> Iterator[str]:
        """What the processes of an attempt (the newest) printed, line by line.

        Args:
            follow: go on until the run ends.
            tail: begin with the last so many lines of every node that match.
            node: only this node.
            rank: only this process.
            pattern: only lines in which this regular expression is found.
            attempt: another attempt than the newest.
            raw: lines as they were written, with their line endings and control sequences; what is not UTF-8 as
                ``surrogateescape`` writes it.
        """
        from sm_llm.launcher.run_logs import log_filter, logs_of

        return logs_of(self, log_filter(tail, node, rank, pattern, raw=raw), follow=follow, attempt=attempt)

    def plot(self, path: str | Path | None = None) -> Path:
        """Write a PNG of loss, learning rate and throughput; by default ``plot.png`` in the run's folder."""
        from sm_llm.launcher.plot import plot_run

        target = Path(path) if path is not None else self.paths.plot
        return plot_run(self.job.events, target, title=self.id)

    def stop(self, *, now: bool = False, wait: bool = False) -> RunState:
        """Ask the run to stop after its current step, saving what it can; ``now`` kills it instead.

        ``wait`` returns only when it has ended. Raises ``SubmitError`` if it is not running.
        """
        attempts = self.attempts
        if not attempts or (state := self.state).is_final:
            raise SubmitError(f"{self.id} is not running: it is {self.state.value}")
        self.backend.stop(self.home, attempts[-1], now=now)
        note_stop(self, now=now)
        while wait and not (state := self.state).is_final:
            time.sleep(POLL_SECONDS)
        return state

    def resume(self, *overrides: Override, step: int | None = None, **fields: Any) -> Run:
        """Continue an interrupted, stopped or failed run from its newest checkpoint, or from that of ``step``.

        With ``step`` the later checkpoints are taken back: the run goes on as if they had never been. ``overrides``
        change the specification from here on. Relative inputs stay those of the folder it was launched from.

        Raises:
            CheckpointError: there is no such checkpoint.
            SubmitError: the run is running or completed.
            SpecError, PlanError: the changes do not fit.
        """
        from sm_llm.launcher.begin import resume

        return resume(self, overrides, fields, step)

    def finish(self) -> Run:
        """Publish the result of a run that did all its steps but ended before its result was published.

        Raises ``SubmitError`` if steps are left or the result is there already.
        """
        from sm_llm.launcher.begin import finish

        return finish(self)

    def rerun(self, *overrides: Override, **fields: Any) -> Run:
        """Repeat this run as a new one, from its record alone: the same specification, digest and input folders."""
        from sm_llm.launcher.begin import rerun

        return rerun(self, overrides, fields)

    def branch(self, *overrides: Override, step: int | None = None, **fields: Any) -> Run:
        """Begin a new run from this run's newest checkpoint, or from that of ``step``, which this run then keeps.

        Raises ``CheckpointError`` if there is no such checkpoint.
        """
        from sm_llm.launcher.begin import branch

        return branch(self, overrides, fields, step)

    def wait(self, *, poll: float | None = None, sleep: Callable[[float], None] = time.sleep) -> RunState:
        """Wait until the run has completed. Raises ``RunFailed``, saying why, if it ends in any other way."""
        from sm_llm.launcher.patience import final_state

        state = final_state(self, poll or max(POLL_SECONDS, self.home.poll_seconds), sleep)
        if not state.is_completed:
            raise RunFailed(self.failure_message())
        return state

    def watch(self, *, since: float | None = None) -> RunState:
        """Show the run until it ends, without telling what happened before ``since`` (seconds since the epoch)."""
        from sm_llm.launcher.console import console
        from sm_llm.launcher.live import accompany

        return accompany(self, console(), wait=True, since=since)

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
        return f"Run({self.uri!r})"
