"""A whole backend in one module, as CONTRIBUTING.md describes it: options, backend, row; no other module is touched.

Its platform is a folder: one folder per job with the files ``request.json``, ``state`` and ``log``.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.errors import Issue, LaunchRefused
from sm_llm.spec.backends import table
from sm_llm.spec.backends.base import BackendOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class ExampleOptions(BackendOptions):
    """Jobs of a queue."""

    name: Literal["example"] = "example"
    """The backend."""
    queue: str = "/nowhere"
    """Folder of the queue."""
    stop_seconds: float = 30.0
    """Time from a request to stop until the job is killed."""


@dataclass(frozen=True)
class ExampleTarget:
    """What the queue gives a job."""

    queue: Path
    command: tuple[tuple[str, ...], ...]

    @property
    def facts(self) -> dict[str, str]:
        return {"queue": str(self.queue)}


class ExampleBackend:
    """Puts jobs into the queue."""

    name = "example"

    def plan_checks(self, plan: Any) -> Any:
        from sm_llm.launcher.planning.plan import Checks

        queue = Path(ExampleOptions.of(plan.job).queue)
        issues = () if queue.is_dir() else (Issue("queue-not-found", "backend.queue", "there is no queue", str(queue)),)
        nodes = plan.job.compute.instance_count
        return Checks(ExampleTarget(queue, tuple((plan.job.task.kind, str(node)) for node in range(nodes))), issues)

    def render(self, plan: Any, job: Any) -> Any:
        from sm_llm.launcher.backends.base import Submission

        return Submission(self.name, job, {"queue": str(plan.target.queue), "command": plan.target.command})

    @contextmanager
    def starting(self, home: Any, number: int, submission: Any) -> Iterator[Any]:
        from sm_llm.runs.run_record import Attempt

        if number > 1 and not self.describe(home).state.is_final:
            raise LaunchRefused(f"{home.uri} is running already")
        yield Attempt.claim(number, f"{submission.request['queue']}/{submission.job.run_id}-{number}")

    def submit(self, submission: Any) -> str:
        folder = Path(submission.request["queue"], f"{submission.job.run_id}-{submission.job.attempt}")
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(submission.to_json()))
        (folder / "state").write_text("PENDING")
        return str(folder)

    def describe(self, home: Any) -> Any:
        from sm_llm.launcher.attempt_outcome import Evidence, judge, record_outcome
        from sm_llm.launcher.backends.base import NativeState
        from sm_llm.runs.run_states import RunState

        record = home.record()
        last = record.attempts[-1]
        if last.state is not None:
            return NativeState(last.state, last.reason or "")
        raw = (Path(last.native_id) / "state").read_text()
        states = {"PENDING": RunState.PENDING, "RUNNING": RunState.RUNNING, "STOPPED": RunState.STOPPED}
        native = NativeState(states.get(raw, RunState.UNKNOWN), raw)
        if not native.state.is_final:
            return native
        outcome = record_outcome(home, last, judge(home, record.run_id, last.number, Evidence(native.state, raw)))
        return NativeState(outcome.state, outcome.reason or "")

    def logs(self, home: Any, attempt: int, wanted: Any, still_running: Callable[[], bool]) -> Iterator[str]:
        del still_running
        lines = (Path(home.record().attempt(attempt).native_id) / "log").read_text().splitlines()
        yield from (line for line in map(wanted.take, lines) if line is not None)

    def stop(self, home: Any, attempt: Any, *, now: bool) -> None:
        del home, now
        (Path(attempt.native_id) / "state").write_text("STOPPED")

    def parse_native(self, text: str) -> Any:
        from sm_llm.launcher.backends.base import NativeJob

        if (match := re.fullmatch(r"(?:example://|queue:)(.+)", text)) is None:
            return None
        request = Path(match[1], "request.json")
        return NativeJob(f"example://{match[1]}", lambda: json.loads(request.read_text())["job"]["run_uri"])


table.BACKENDS["example"] = table.BackendEntry(ExampleOptions, f"{__name__}:ExampleBackend")
