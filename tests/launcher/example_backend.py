"""A whole backend in one module, as CONTRIBUTING.md describes it: options, backend, row; no other module is touched.

Its platform is a folder: one folder per job with the files ``request.json``, ``state`` and ``log``.
"""

import json
from pathlib import Path
from typing import Any, Literal

from sm_llm.errors import Issue
from sm_llm.spec.backends import table
from sm_llm.spec.backends.base import BackendOptions


class ExampleOptions(BackendOptions):
    """Jobs of a queue."""

    name: Literal["example"] = "example"
    """The backend."""
    queue: str = "/nowhere"
    """Folder of the queue."""
    stop_seconds: float = 30.0
    """Time from a request to stop until the job is killed."""


table.BACKENDS["example"] = table.BackendEntry(
    ExampleOptions, f"{__name__}:ExampleBackend"
)  # before jobs have their classes

from sm_llm.launcher.attempt_outcome import record_end  # noqa: E402
from sm_llm.launcher.backend import NativeJob, NativeState, Submission  # noqa: E402
from sm_llm.launcher.backends.job_backend import JobBackend  # noqa: E402
from sm_llm.launcher.observe.logs import read_logs  # noqa: E402
from sm_llm.launcher.planning.plan import Checks, PlainTarget  # noqa: E402
from sm_llm.runs.run_states import RunState  # noqa: E402


class ExampleBackend(JobBackend):
    """Puts jobs into the queue."""

    name = "example"

    def plan_checks(self, plan: Any) -> Checks:
        queue, nodes = ExampleOptions.of(plan.job).queue, range(plan.job.compute.instance_count)
        lacks = Issue("queue-not-found", "backend.queue", "there is no queue", queue)
        target = PlainTarget(tuple((plan.job.task.kind, str(node)) for node in nodes), {"queue": queue})
        return Checks(target, () if Path(queue).is_dir() else (lacks,))

    def render(self, plan: Any, job: Any) -> Submission:
        return Submission(self.name, job, {**plan.facts, "command": plan.command})

    def submit(self, submission: Submission) -> str:
        folder = Path(submission.request["queue"], f"{submission.job.run_id}-{submission.job.attempt}")
        folder.mkdir()
        (folder / "request.json").write_text(json.dumps(submission.to_json()))
        (folder / "state").write_text("pending")
        return str(folder)

    def open_state(self, run_store: Any, record: Any) -> NativeState:
        raw = Path(record.attempts[-1].native_id, "state").read_text()
        state = RunState(raw) if raw in ("pending", "running", "stopped") else RunState.UNKNOWN
        return NativeState.of(record_end(run_store, record, state, raw)) if state.is_final else NativeState(state, raw)

    def logs(self, run_store: Any, attempt: int, wanted: Any, still_running: Any) -> Any:
        kept = run_store.paths.node_log(attempt, 0)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(Path(run_store.record().attempt(attempt).native_id, "log").read_text())
        return read_logs(run_store.paths, attempt, wanted, still_running=still_running)

    def parse_native(self, text: str) -> NativeJob | None:
        scheme, _, location = text.replace("queue:", "example://").partition("://")
        request = Path(location, "request.json")
        found = NativeJob(f"example://{location}", lambda: json.loads(request.read_text())["job"]["run_uri"])
        return found if scheme == "example" else None

    def stop(self, run_store: Any, attempt: Any, *, now: bool) -> None:
        Path(attempt.native_id, "state").write_text("stopped")
