"""Local jobs use every visible GPU unless their specification sets the number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.local.backend import LocalBackend
from sm_llm.launcher.planner import plan
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.load import load
from sm_llm.spec.machines import machine
from sm_llm.spec.machines.machine import Machine, this_machine
from sm_llm.spec.references import workflow_job

if TYPE_CHECKING:
    from pathlib import Path

ENVIRON = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
SCRIPT = {"name": "s", "task": {"kind": "script", "entry": "train.py"}}


def processes(source: Any, *overrides: str, environ: dict[str, str] | None = None) -> int:
    spec = load(source, overrides, environ=ENVIRON if environ is None else environ).spec
    assert isinstance(spec, JobSpec)
    return spec.compute.processes


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 4),
        (["compute.processes_per_instance=1"], 1),
        (["compute.instance_count=2"], 2),
        (["compute.instance_count=8"], 1),
        (["environment.CUDA_VISIBLE_DEVICES=''"], 1),
        (["environment.CUDA_VISIBLE_DEVICES='0,3'"], 2),
        (["environment.CUDA_VISIBLE_DEVICES=3"], 1),
    ],
)
def test_a_training_uses_all_visible_gpus_unless_set_otherwise(overrides: list[str], expected: int) -> None:
    assert processes("smoke", *overrides) == expected
    assert processes("smoke", *overrides, environ={"CUDA_VISIBLE_DEVICES": ""}) == (
        2 if overrides == ["environment.CUDA_VISIBLE_DEVICES='0,3'"] else 1
    )


def test_programs_that_start_ranks_use_them_and_others_do_not() -> None:
    assert processes(SCRIPT) == 4
    assert processes({**SCRIPT, "task": {"kind": "script", "entry": "run.sh"}}) == 1
    assert processes({"name": "p", "task": {"kind": "prepare", "sources": ["x"], "seq_length": 8}}) == 1


def test_a_workflows_training_step_uses_them_and_keeps_its_other_settings() -> None:
    train = {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64},
        "max_steps": 1,
    }
    prepare = {"kind": "prepare", "sources": ["x"], "seq_length": 8}
    steps = {
        "prepare": {"task": prepare},
        "train": {"task": train},
        "own": {"task": train, "compute": {"instance_count": 4}},
    }
    loaded = load({"name": "w", "compute": {"instance_count": 2}, "steps": steps}, environ=ENVIRON)
    assert isinstance(loaded.spec, WorkflowSpec)
    found = {name: workflow_job(loaded.spec, name).compute for name in steps}
    assert {name: (it.instance_count, it.processes) for name, it in found.items()} == {
        "prepare": (2, 1), "train": (2, 2), "own": (4, 1),
    }  # fmt: skip
    assert loaded.origins["steps.train.compute.processes_per_instance"] == "this machine's 4 GPUs"


def test_a_managed_job_and_a_job_that_was_launched_before_do_not_depend_on_this_machine() -> None:
    from sm_llm.spec.loading.load import changed

    cloud = ["backend.name=sagemaker", "compute.instance_type=ml.g5.xlarge", "storage=s3://bucket/runs"]
    assert load("smoke", cloud, environ=ENVIRON).spec.compute.processes_per_instance is None
    spec = load("smoke", environ={}, overrides=["compute.processes_per_instance=null"]).spec
    assert isinstance(spec, JobSpec)
    assert changed(spec, ["task.seed=1"]).spec.compute == spec.compute


def test_the_plan_states_which_devices_compute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sm_llm.launcher.display.tables import plan_table

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    assert plan("smoke")[0].facts["devices"] == "CPU (no NVIDIA GPU is visible)"
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    (found,) = plan("smoke")
    assert found.world_size == 2
    assert found.facts["devices"] == "all 2 visible GPUs (compute.processes_per_instance is not set)"
    (one,) = plan("smoke", "compute.processes_per_instance=1")
    assert one.facts["devices"] == "1 of 2 visible GPUs"
    assert "devices" in [str(cell) for cell in plan_table(one).columns[0].cells]
    backend = LocalBackend(Machine(2, ("0", "1")))
    target = backend.plan_checks(plan("smoke", "environment.CUDA_VISIBLE_DEVICES=''")[0]).target
    assert target is not None
    assert "from environment" in target.facts["devices"]
    assert this_machine({}).gpus == ("0", "1")
