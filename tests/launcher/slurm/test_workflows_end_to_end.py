"""A workflow on a real Slurm cluster that is stopped and continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState
from tests.launcher.slurm.test_slurm_end_to_end import SECONDS, await_step, job_of, spec

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

STEPS = 200


def events_of(run: Run, kind: str) -> list[dict[str, Any]]:
    run.metrics()  # brings the events of a run in S3 here
    return [dict(it) for it in read_events(run.events) if it["kind"] == kind]


def stopped_flow(folder: Path) -> dict[str, Any]:
    """A training, and a program that reads what it has published."""
    (folder / "program").mkdir(exist_ok=True)
    (folder / "program" / "report.sh").write_text('ls "$SM_CHANNEL_MODEL"\n')
    job = spec(folder, compute={"processes_per_instance": 1})
    train = {**job.pop("task"), "max_steps": STEPS, "checkpoint": {"every_steps": 10}}
    report = {"kind": "script", "entry": "report.sh", "source": str(folder / "program")}
    steps = {
        "train": {"task": train},
        "report": {"task": report, "inputs": {"model": "steps.train.output"}},
    }
    return {**job, "name": "stopped", "steps": steps}


def test_a_running_workflow_is_stopped_and_the_same_fit_continues_it(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = stopped_flow(tmp_path)
    run = sm_llm.launch(job)
    train, report = run.steps["train"], run.steps["report"]
    await_step(slurm, train, 10)
    assert report.state is RunState.PENDING
    run.stop()
    slurm.await_state(lambda: run.state.is_final, SECONDS)
    assert (run.state, train.state, report.state) == (
        RunState.INTERRUPTED, RunState.INTERRUPTED, RunState.STOPPED,
    )  # fmt: skip
    assert "step train: stopped after step" in str(run.status().reason)
    assert slurm.run("squeue", "-h", "-j", f"{job_of(train)},{job_of(report)}") == "", "no job of it is left"
    saved = max(it.step for it in train.checkpoints())

    again = sm_llm.launch(job)
    assert (again.id, again.continued_attempt) == (run.id, 2)
    slurm.await_state(lambda: again.state.is_final, SECONDS)
    assert again.state is RunState.COMPLETED, again.status().reason
    assert [it.state for it in again.steps["train"].attempts] == [RunState.INTERRUPTED, RunState.COMPLETED]
    assert [it.state for it in again.steps["report"].attempts] == [RunState.STOPPED, RunState.COMPLETED]
    [restored] = events_of(again.steps["train"], "checkpoint_restored")
    assert restored["step"] == saved
    assert len(again.steps["train"].metrics()) == STEPS
    assert any("model.safetensors" in line for line in again.steps["report"].logs())
