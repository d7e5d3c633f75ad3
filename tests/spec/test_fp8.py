"""``precision.compute: fp8`` and the activation memory budget: what refuses them before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.planner import plan

JOB = {
    "name": "fp8",
    "task": {
        "kind": "train", "model": {"preset": "tiny"}, "data": {"format": "synthetic", "seq_length": 64, "rows": 32},
        "max_steps": 1, "precision": {"compute": "fp8", "compile": True},
    }
}  # fmt: skip
AWS = {
    "backend": {"name": "sagemaker", "role": "arn:aws:iam::123456789012:role/x", "region": "us-east-1"},
    "storage": "s3://bucket-x/runs",
}
SHARED = {"compute.processes_per_instance": 2, "task.precision.compile": False}


def test_fp8_and_a_budget_pass() -> None:
    [found] = plan(JOB, **{"task.parallelism.activation_checkpointing": "budget"})
    assert found.job.task.precision.compute == "fp8"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"task.data.seq_length": 24}, "fp8-tokens-not-divisible"),
        ({**SHARED, "task.parallelism.tensor_parallel_degree": 2}, "fp8-with-tensor-parallelism"),
        ({"task.parallelism": {"strategy": "smp"}}, "fp8-unsupported"),
        ({"task.parallelism": {"strategy": "nxd"}}, "fp8-unsupported"),
        ({"task.parallelism.activation_memory_budget": 0.5}, "budget-without-effect"),
        (
            {"task.parallelism.activation_checkpointing": "budget", "task.precision.compile": False},
            "budget-without-compile",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], code: str) -> None:
    with pytest.raises(SpecError) as error:
        plan(JOB, **fields)
    assert code in {issue.code for issue in error.value.issues}


@pytest.mark.parametrize(
    ("machine", "fits"), [("ml.p5.48xlarge", True), ("ml.g6.xlarge", True), ("ml.p4d.24xlarge", False)]
)
def test_gpus_without_fp8_are_refused(machine: str, fits: bool) -> None:
    fields = {**AWS, "compute.instance_type": machine, "backend.max_run_seconds": 3600}
    if fits:
        assert plan(JOB, **fields)
        return
    with pytest.raises(PlanError) as error:
        plan(JOB, **fields)
    assert "compute-format-unsupported-by-gpu" in {issue.code for issue in error.value.issues}
    assert "A100" in str(error.value)
