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


CLUSTERS = {
    "slurm": {"backend.name": "slurm", "backend.shared_folder": "/fsx/x", "backend.virtual_environment": "/fsx/venv",
              "storage": "/fsx/runs"},
    "kubeflow": {"backend.name": "kubeflow", "backend.image": "image", "storage": "s3://bucket-x/runs"},
    "local": {},
}  # fmt: skip


@pytest.mark.parametrize("backend", CLUSTERS)
def test_every_backend_refuses_a_gpu_without_fp8_and_warns_of_one_without_bf16(backend: str) -> None:
    for fields in ({"compute.gpu": "A100"}, {"compute.instance_type": "ml.p4d.24xlarge"}):
        if backend == "local" and "compute.instance_type" in fields:
            continue
        with pytest.raises(PlanError, match="A100 has no fp8") as error:
            plan(JOB, **CLUSTERS[backend], **fields)
        assert error.value.issues[0].path == "task.precision.compute"
    [found] = plan(JOB, **CLUSTERS[backend], **{"compute.gpu": "V100", "task.precision.compute": "bf16"})
    [warning] = [it for it in found.issues if it.code == "bf16-emulated"]
    assert (warning.path, warning.severity, warning.remedy) == ("task.precision.compute", "warning", "Use fp32")


def test_gpus_of_several_types_and_masters_in_bf16_are_judged_as_well() -> None:
    group = {"instance_count": 1}
    groups = [{"name": it, "instance_type": f"ml.{it}.48xlarge", **group} for it in ("p5", "g5")]
    fields = {**AWS, "compute": {"instance_type": "ml.p5.48xlarge", "instance_count": 2}}
    with pytest.raises(PlanError, match="A10G has no fp8"):
        plan(JOB, **fields, **{"backend.instance_groups": groups, "backend.max_run_seconds": 3600})
    [found] = plan(JOB, **{"task.precision": {"compute": "auto", "master": "bf16"}, "compute.gpu": "T4"})
    [warning] = [it for it in found.issues if it.code == "bf16-emulated"]
    assert warning.remedy == "Use fp32, with task.precision.master: fp32"


def test_matrices_whose_sizes_do_not_fit_are_named() -> None:
    odd = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 72}
    with pytest.raises(PlanError, match=r"0 of 7 linear layers.*q_proj \(40 x 40\).*Use bf16") as error:
        plan(JOB, **{"task.model.config": odd})
    assert [it.code for it in error.value.issues] == ["fp8-without-products"]
    [found] = plan(JOB, **{"task.model.config": {"intermediate_size": 72}})
    [warning] = [it for it in found.issues if it.code == "fp8-in-part"]
    assert "4 of 7 linear layers" in warning.message
    assert all(f"mlp.{it}_proj" in warning.message for it in ("gate", "up", "down"))
    assert "q_proj" not in warning.message
    assert "fp8-in-part" not in {it.code for it in plan(JOB)[0].issues}


def test_experts_which_stay_in_bf16_are_warned_of() -> None:
    [found] = plan(JOB, **{"task.model": {"preset": "mixtral-8x7b", "config": {"num_hidden_layers": 2}}})
    [warning] = [it for it in found.issues if it.code == "fp8-in-part"]
    assert "the experts, 97% of its parameters" in warning.message


def test_a_plan_without_the_package_is_shown_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm import optional
    from sm_llm.launcher.api import launch

    monkeypatch.setattr(optional, "is_installed", lambda module: module != "torchao")
    [found] = plan(JOB)
    assert [(it.code, it.path) for it in found.unsupported] == [("local-package-missing", "task.precision.compute")]
    with pytest.raises(PlanError, match="torchao is not installed"):
        launch(JOB, new=True)


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
