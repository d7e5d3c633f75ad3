"""The handle of a run: everything is read from the run's folder, so that any process can hold one."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.events import read_events
from sm_llm.contract.run_paths import RunPaths
from sm_llm.contract.run_record import Attempt, RunRecord
from sm_llm.contract.states import RunState
from sm_llm.errors import RunFailed, SmLlmError, SubmitError
from sm_llm.launcher.metrics import MetricRow, Summary, metric_rows, summarise
from sm_llm.launcher.results import RESULT_LINK, result_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.launcher.backends.base import Backend

POLL_SECONDS = 0.5


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
    started: float | None
    ended: float | None
    progress: Summary
    result: str | None
    steps: tuple[Status, ...] = ()
    """Of a workflow: the steps that have begun."""

    def to_json(self) -> dict[str, Any]:
        """The status as JSON values."""
        return asdict(self)


class Run:
    """A run by its folder. Cheap to make; every method reads what is true at that moment."""

    def __init__(self, uri: str | Path) -> None:
        """``uri`` is the run's folder. Raises ``StorageError`` if there is no run record in it."""
        from sm_llm.storage.uri import parse

        location = parse(uri)
        if location.path is None:
            raise SubmitError(f"{uri}: this version reads runs in folders only")
        self.root: Path = location.path
        self._created_from: RunRecord = RunRecord.read(self.paths.record)
        self.continued_attempt: int | None = None
        """Set by ``launch`` when it continued this run instead of starting another."""

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    @property
    def uri(self) -> str:
        return str(self.root)

    @property
    def id(self) -> str:
        return self._created_from.run_id

    @property
    def record(self) -> RunRecord:
        """The run record as it stands now."""
        return RunRecord.read(self.paths.record)

    @property
    def kind(self) -> str:
        """``train``, ``prepare`` or ``workflow``."""
        spec = self._created_from.spec
        return "workflow" if "steps" in spec else str(spec["task"]["kind"])

    @property
    def steps(self) -> dict[str, Run]:
        """The steps of a workflow that have begun, in order; empty for a job."""
        names = self._created_from.spec.get("steps", {})
        folders = {name: self.root / "steps" / name for name in names}
        return {name: Run(folder) for name, folder in folders.items() if RunPaths(folder).record.is_file()}

    @property
    def job(self) -> Run:
        """The run whose metrics and result stand for this one: itself, or a workflow's newest step."""
        steps = list(self.steps.values())
        training = [step for step in steps if step.kind == "train"]
        return (training or steps or [self])[-1]

    @property
    def _backend(self) -> Backend:
        from sm_llm.launcher.backends.registry import backend

        return backend(str(self._created_from.spec["backend"]["name"]))

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every start of the run, oldest first."""
        return self.record.attempts

    @property
    def state(self) -> RunState:
        """The state now."""
        return self._backend.describe(self.uri, self._native_id or "").state

    @property
    def _native_id(self) -> str | None:
        attempts = self.record.attempts
        return attempts[-1].native_id if attempts else None

    @property
    def result(self) -> Path | None:
        """The published folder (a model, or prepared rows), or None before it is there."""
        if self.kind != "workflow":
            return result_folder(self.root, self.id)
        last = self.steps.get(list(self._created_from.spec["steps"])[-1])
        return None if last is None else last.result

    @property
    def result_link(self) -> Path | None:
        """The short path ``<run>/result`` to the published folder, where the file system has links; else the folder."""
        link = self.root / RESULT_LINK
        return link if link.exists() else self.result

    def status(self) -> Status:
        """State, progress and result, from the record, the lock and the events."""
        native = self._backend.describe(self.uri, self._native_id or "")
        attempts = self.record.attempts
        last = attempts[-1] if attempts else None
        result = self.result
        return Status(
            run_id=self.id,
            uri=self.uri,
            kind=self.kind,
            state=native.state,
            reason=native.detail or None,
            attempt=last.number if last else 0,
            native_id=last.native_id if last else None,
            started=last.started if last else None,
            ended=last.ended if last else None,
            progress=summarise(read_events(self.job.paths.events)),
            result=None if result is None else str(result),
            steps=tuple(step.status() for step in self.steps.values()),
        )

    def metrics(self) -> list[MetricRow]:
        """One row per step with exact floats; where attempts overlap, the newest attempt's values."""
        return metric_rows(self.job.paths.events)

    def logs(
        self, *, follow: bool = False, tail: int | None = None, node: int | None = None, pattern: str | None = None
    ) -> Iterator[str]:
        """Lines of the newest attempt's nodes. ``tail``: only the last lines; ``pattern``: a regular expression."""
        try:
            wanted = re.compile(pattern or "")
        except re.error as error:
            raise SmLlmError(f"{pattern!r} is not a regular expression: {error}") from None
        for run in self._jobs(follow):
            yield from filter(wanted.search, run._own_logs(follow, tail, node))

    def _jobs(self, follow: bool) -> Iterator[Run]:
        """This run, or a workflow's steps in order; with ``follow`` those that are yet to begin are waited for."""
        if self.kind != "workflow":
            yield self
            return
        for name in self._created_from.spec["steps"]:
            while follow and name not in self.steps and not self.state.is_final:
                time.sleep(POLL_SECONDS)
            if name in self.steps:
                yield self.steps[name]

    def _own_logs(self, follow: bool, tail: int | None, node: int | None) -> Iterator[str]:
        from sm_llm.launcher.logs import read_logs

        attempts = self.record.attempts
        if attempts:
            yield from read_logs(
                self.paths,
                attempts[-1].number,
                still_running=lambda: follow and not self.state.is_final,
                tail=tail,
                node=node,
            )

    def plot(self, path: str | Path | None = None) -> Path:
        """Write a PNG of loss, learning rate and throughput; by default ``plot.png`` in the run's folder."""
        from sm_llm.launcher.plot import plot_run

        target = Path(path) if path is not None else self.paths.plot
        return plot_run(self.job.paths.events, target, title=self.id)

    def stop(self) -> None:
        """Ask the run to stop after its current step. Raises ``SubmitError`` if it is not running."""
        if self.state.is_final:
            raise SubmitError(f"{self.id} is not running: it is {self.state.value}")
        self._backend.stop(self.uri, self._native_id or "")

    def wait(self, *, poll: float = POLL_SECONDS, sleep: Callable[[float], None] = time.sleep) -> RunState:
        """Wait until the run has completed. Raises ``RunFailed``, saying why, if it ends in any other way."""
        while not (state := self.state).is_final:
            sleep(poll)
        if state is not RunState.COMPLETED:
            raise RunFailed(self.failure_message())
        return state

    def watch(self) -> RunState:
        """Show the run until it ends, as ``sm-llm fit`` does: a live line, then where everything is."""
        from rich.console import Console

        from sm_llm.launcher.live import accompany

        return accompany(self, Console(highlight=False), wait=True)

    def failure_message(self) -> str:
        """Why the run failed and where to look."""
        native = self._backend.describe(self.uri, self._native_id or "")
        reason = native.detail or "no reason was given"
        return f"{self.id} is {native.state.value}: {reason}. Logs: sm-llm logs {self.uri}"

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"
