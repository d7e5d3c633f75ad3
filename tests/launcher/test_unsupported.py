"""What cannot run yet or here is refused by every way to start it, and shown by planning (``Plan.unsupported``)."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm import launch
from sm_llm.errors import PlanError
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition
from sm_llm.launcher.backends.sagemaker.sdk import estimators
from sm_llm.launcher.planner import plan
from sm_llm.spec.parallelism.nxd import NxdSpec
from tests.cli.test_typed_faults import cli_output

if TYPE_CHECKING:
    from pathlib import Path

CLOUD = {
    "backend": {
        "name": "sagemaker",
        "role": "arn:aws:iam::111122223333:role/train",
        "region": "us-east-1",
        "max_run_seconds": 3600,
    },
    "storage": "s3://sm-llm-tests/runs",
}
NXD = {
    "task": {
        "kind": "train",
        "model": {"preset": "llama-3-8b"},
        "data": {"format": "synthetic", "seq_length": 8192},
        "parallelism": {"strategy": "nxd", "tensor_parallel_degree": 32},
        "max_steps": 1,
        "global_batch_size": 4,
        "micro_batch_size": 1,
    },
    "compute": {"instance_type": "ml.trn1.32xlarge", "instance_count": 4},
}
PRECOMPILE = {"task": {"kind": "precompile", "training": NXD["task"]}, "compute": NXD["compute"]}
JOBS = {
    "nxd": ({"name": "job", **CLOUD, **NXD}, "task.parallelism.strategy"),
    "precompile": ({"name": "job", **CLOUD, **PRECOMPILE}, "task.training.parallelism.strategy"),
}


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str]:
    """A job without a worker, and the path that its refusal names."""
    monkeypatch.setattr(NxdSpec, "can", replace(NxdSpec.can, train=False))
    return JOBS[request.param]


def as_workflow(job: dict[str, Any]) -> dict[str, Any]:
    step = {name: job[name] for name in ("task", "compute")}
    return {**{name: it for name, it in job.items() if name not in step}, "steps": {"one": step}}


def test_every_way_to_start_it_refuses(job: tuple[dict[str, Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, path = job
    monkeypatch.setattr(estimators, "_estimator_class", lambda: pytest.fail)  # without the SDK, which it never needs
    monkeypatch.setattr(estimators, "watch_tuners", lambda: None)
    monkeypatch.setattr(estimators, "watch_pipelines", lambda: None)
    monkeypatch.setattr(estimators, "pytorch", lambda: object)
    # Nobody answers there, so whoever asks the storage first reports that.
    far = {**spec, "storage_options": {"endpoint_url": "http://127.0.0.1:9"}}
    ways = {
        "launch": lambda: launch(spec, new=True),
        "launch that may continue a run": lambda: launch(far),
        "launch of a workflow": lambda: launch(as_workflow(far)),
        "pipelines": lambda: definition(as_workflow(spec)),
        "estimator": lambda: estimators.estimator(spec),
    }
    ways["distribution"] = lambda: estimators.distribution(spec)
    for name, way in ways.items():
        with pytest.raises(PlanError, match="there is no worker for") as error:
            way()
        assert [it.path.removeprefix("steps.one.") for it in error.value.issues] == [path], name


def test_planning_and_dry_runs_show_it_with_the_code_of_a_refusal(
    job: tuple[dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    spec, path = job
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(spec))
    (planned,) = plan(spec)
    assert [it.path for it in planned.unsupported] == [path]
    code, text = cli_output(monkeypatch, capsys, "plan", str(file))
    assert code == 2
    assert "cannot run" in text
    code, text = cli_output(monkeypatch, capsys, "fit", str(file), "--dry-run")
    assert (code, "TrainingJobName" in text) == (2, True)
    assert "there is no worker for" in text
    (submission,) = launch(spec, dry_run=True)
    assert submission.request["TrainingJobName"]


def test_the_record_of_a_plan_holds_it_only_where_there_is_something(job: tuple[dict[str, Any], str]) -> None:
    (found,) = plan(job[0])[0].to_json()["unsupported"]
    assert (found["path"], found["code"].endswith("without-worker")) == (job[1], True)
    assert "unsupported" not in plan("smoke")[0].to_json()


def test_a_local_job_for_neuron_cores_is_refused_by_the_same_gate() -> None:
    here = {**NXD, "compute": {"processes_per_instance": 32}}
    spec = {"name": "job", **here, "backend": {"name": "local"}, "storage": "./runs"}
    (issue,) = plan(spec)[0].unsupported
    assert (issue.code, issue.path) == ("local-strategy-unsupported", "task.parallelism.strategy")
    with pytest.raises(PlanError, match="does not start NeuronCores"):
        launch(spec, new=True)


def test_a_local_job_whose_packages_are_missing_is_refused_by_the_same_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm import optional

    monkeypatch.setattr(optional, "is_installed", lambda module: module != "torch")
    assert [it.path for it in plan("smoke")[0].unsupported] == ["task.kind"]
    with pytest.raises(PlanError, match="a local run cannot start: torch is not installed"):
        launch("smoke", new=True)


def test_what_the_plan_itself_needs_for_s3_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm import optional

    monkeypatch.setattr(optional, "is_installed", lambda module: module not in ("boto3", "botocore"))
    with pytest.raises(PlanError, match="boto3 is not installed") as error:
        plan("smoke", "storage=s3://bucket/runs")
    found = [it.path for it in error.value.issues if it.code == "local-s3-package-missing"]
    assert found == ["storage"]


def test_a_step_whose_tracker_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm import optional

    monkeypatch.setattr(optional, "is_installed", lambda module: module != "mlflow")
    step = plan("smoke")[0].job.model_dump(mode="json", include={"name", "task", "compute"})
    [found] = plan(as_workflow(step), "steps.one.task.logging.sinks={mlflow: {}}")
    assert [it.path for it in found.unsupported] == ["steps.one.task.logging.sinks.mlflow"]


def test_a_step_of_a_local_workflow_passes_the_same_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sm_llm import optional
    from sm_llm.launcher.backends.local import workflow
    from sm_llm.spec.loading.load import load

    # At its launch, days ago, the workflow could run.
    monkeypatch.setattr(optional, "is_installed", lambda module: module != "torch")
    flow: Any = load(
        as_workflow(plan("smoke")[0].job.model_dump(mode="json", include={"name", "task", "compute"}))
    ).spec
    nothing: Any = SimpleNamespace(count=0)
    outcome = workflow._run_step(nothing, "run.one", flow, "one", {}, nothing, nothing, tmp_path)
    assert outcome.state.value == "failed"
    assert "a local run cannot start: torch is not installed" in str(outcome.reason)


CLUSTERS: dict[str, dict[str, Any]] = {
    "sagemaker": CLOUD,
    "slurm": {
        "backend": {"name": "slurm", "shared_folder": "/fsx/x", "virtual_environment": "/fsx/venv"},
        "storage": "/fsx/runs",
    },
    "kubeflow": {"backend": {"name": "kubeflow", "image": "image"}, "storage": "s3://sm-llm-tests/runs"},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    ("strategy", "instance_type", "code"),
    [
        ("fsdp", "ml.trn1.32xlarge", "strategy-not-for-trainium"),
        ("nxd", "ml.p5.48xlarge", "nxd-needs-trainium"),
        ("smp", "ml.g5.48xlarge", "smp-instance-unsupported"),
    ],
)
def test_every_cluster_refuses_an_engine_that_does_not_run_on_its_machines(
    cluster: str, strategy: str, instance_type: str, code: str
) -> None:
    compute = {"instance_type": instance_type}
    task = {**NXD["task"], "parallelism": {"strategy": strategy}, "global_batch_size": 64}  # type: ignore[dict-item]
    with pytest.raises(PlanError) as error:
        plan({"name": "engine", "task": task, "compute": compute, **CLUSTERS[cluster]})
    assert code in [it.code for it in error.value.issues]
