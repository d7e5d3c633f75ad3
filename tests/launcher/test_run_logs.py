"""The logs of a workflow, from records and logs written by hand while they are followed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.build_submission import new_record
from sm_llm.launcher.observe import run_logs
from sm_llm.launcher.run import Run
from sm_llm.runs.run_lock import hold
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import FolderRunStore
from sm_llm.spec.job import JobSpec, WorkflowSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DATA = {"format": "synthetic", "seq_length": 8}
TASK: dict[str, Any] = {"kind": "train", "model": {"preset": "tiny"}, "data": DATA, "max_steps": 40}
NAMES = ("done", "again", "late")


class Flow:
    """A workflow's folder whose newest attempt began at second 100, with the record of every step."""

    def __init__(self, root: Path) -> None:
        steps = {name: {"task": TASK} for name in NAMES}
        self.run_store = FolderRunStore(root)
        record = new_record(
            "flow-1", WorkflowSpec.model_validate({"name": "flow", "steps": steps}), "", {}, [], created=1.0
        )
        self.run_store.create(record.with_attempt(Attempt(number=2, native_id="7", started=100.0)))
        for name in NAMES:
            job = JobSpec.model_validate({"name": name, "task": TASK})
            self.run_store.below("steps", name).create(new_record(f"flow-1-{name}", job, "", {}, [], created=1.0))

    def ran(self, step: str, number: int, started: float, state: RunState, line: str) -> None:
        """An attempt of a step that has ended, and what it printed."""
        run_store = self.run_store.below("steps", step)
        log = run_store.paths.node_log(number, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"{line}\n")
        ended = Attempt(number=number, native_id="8", started=started, ended=started + 1, state=state)
        run_store.update(lambda record: record.with_attempt(ended))

    def end(self) -> None:
        """The workflow's newest attempt fails."""
        ended = Attempt(number=2, native_id="7", started=100.0, ended=120.0, state=RunState.FAILED)
        self.run_store.update(lambda record: record.with_attempt(ended))


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    made = Flow(tmp_path / "flow-1")
    made.ran("done", 1, 10.0, RunState.COMPLETED, "done")
    made.ran("again", 1, 20.0, RunState.FAILED, "old")
    return made


def followed(flow: Flow, monkeypatch: pytest.MonkeyPatch, *happens: Callable[[], None]) -> list[str]:
    """The lines of the workflow, followed while one thing after the other happens between two looks."""
    coming = iter(happens)
    monkeypatch.setattr(run_logs, "time", SimpleNamespace(sleep=lambda _: next(coming)()))
    with hold(flow.run_store.root):
        return list(Run(flow.run_store).logs(follow=True))


def test_following_a_resumed_workflow_waits_for_the_new_attempt_of_every_step_it_runs(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = followed(
        flow,
        monkeypatch,
        lambda: flow.ran("again", 2, 101.0, RunState.COMPLETED, "new"),
        lambda: flow.ran("late", 1, 102.0, RunState.COMPLETED, "late"),
    )
    assert lines == ["done", "new", "late"]


def test_following_a_workflow_ends_with_it_though_steps_never_began(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert followed(flow, monkeypatch, flow.end) == ["done", "old"]
