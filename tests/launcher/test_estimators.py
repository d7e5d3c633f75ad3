"""Estimators: the request that the real SDK sends equals the one that render() gives, on every path to it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from moto import mock_aws

from sm_llm.errors import PlanError, SpecError, SubmitError
from sm_llm.launcher.backends.sagemaker.sdk.estimators import distribution, estimator
from sm_llm.launcher.backends.sagemaker.sdk.pipeline_sdk import build_pipeline
from sm_llm.spec.parallelism.table import trained
from tests.fixtures.sagemaker_calls import store_data

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROLE = "arn:aws:iam::111122223333:role/train"
BUCKET = "sm-llm-tests"
TOKENS = 2_000_000_000


def job(task: dict[str, Any], compute: dict[str, Any], **more: Any) -> dict[str, Any]:
    backend = {"name": "sagemaker", "role": ROLE, "region": "us-east-1", **more.pop("backend", {})}
    head = {"name": "golden", "task": task, "compute": compute, "backend": backend}
    return {**head, "storage": f"s3://{BUCKET}/runs", **more}


def training(model: str, parallelism: dict[str, Any], seq_length: int = 4096) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": {"preset": model},
        "data": {"format": "rows", "train": "inputs.corpus", "seq_length": seq_length},
        "parallelism": parallelism,
        "max_tokens": TOKENS,
    }


INPUTS = {"corpus": {"uri": f"s3://{BUCKET}/corpus"}}
SMP = {"strategy": "smp", "hybrid_shard_degree": 32, "tensor_parallel_degree": 4, "sm_activation_offloading": True}
GOLDEN: dict[str, dict[str, Any]] = {
    "llama-2-7b fsdp": job(
        training("llama-2-7b", {"strategy": "fsdp"}),
        {"instance_type": "ml.p5.48xlarge", "instance_count": 2},
        inputs=INPUTS,
        backend={
            "spot": True,
            "vpc": {"subnets": ["subnet-0a"], "security_group_ids": ["sg-0b"]},
            "tags": {"team": "x"},
        },
    ),
    "llama-2-70b smp": job(
        training("llama-2-70b", SMP),
        {"instance_type": "ml.p4d.24xlarge", "instance_count": 16},
        inputs={"corpus": {"uri": f"s3://{BUCKET}/corpus", "mode": "File"}},
        backend={"max_retry_attempts": 3, "remote_debug": True, "encrypt_inter_container_traffic": True},
    ),
    "llama-3-8b nxd": job(
        training("llama-3-8b", {"strategy": "nxd", "tensor_parallel_degree": 32}, 8192),
        {"instance_type": "ml.trn1.32xlarge", "instance_count": 4},
        inputs=INPUTS,
    ),
    "script": job(
        {"kind": "script", "entry": "x.py", "args": ["--a", "b c"]},
        {"instance_type": "ml.g5.2xlarge", "instance_count": 1},
        inputs={"data": f"s3://{BUCKET}/data", "shared": {"file_system_id": "fs-12345678", "directory_path": "/abc"}},
        backend={
            "max_run_seconds": 3600,
            "keep_alive_period_in_seconds": 600,
            "volume_size_gb": 50,
            "vpc": {"subnets": ["subnet-0a"], "security_group_ids": ["sg-0b"]},
        },
        environment={"MODE": "fast"},
    ),
    "shell": job(
        {"kind": "script", "entry": "x.sh"},
        {"instance_type": "ml.g5.2xlarge", "instance_count": 2},
        backend={"max_run_seconds": 3600},
    ),
    "prepare": job(
        {"kind": "prepare", "sources": [f"s3://{BUCKET}/text/"], "seq_length": 512},
        {"instance_type": "ml.m5.2xlarge"},
        backend={"max_run_seconds": 3600},
    ),
}


if "nxd" not in trained():  # what cannot run yet has no estimator
    del GOLDEN["llama-3-8b nxd"]


@pytest.fixture
def source(tmp_path: Path) -> str:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "x.py").write_text("print(1)\n")
    (folder / "x.sh").write_text("echo 1\n")
    return str(folder)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """S3 by moto; what is asked of SageMaker itself is only written down: (operation, arguments)."""
    import boto3
    import botocore.client

    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    calls: list[tuple[str, dict[str, Any]]] = []
    original = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def call(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        if self.meta.service_model.service_name != "sagemaker":
            return original(self, operation, arguments)
        calls.append((operation, arguments))
        return {f"{operation.removeprefix('Create')}Arn": "arn:x", "TrainingJobArn": "arn:x"}

    with mock_aws():
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        store_data()
        monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
        yield calls


def built(name: str, source: str, *overrides: str, **kwargs: Any) -> Any:
    spec = GOLDEN[name]
    if spec["task"]["kind"] == "script":
        spec = {**spec, "task": {**spec["task"], "source": source}}
    return estimator(spec, *overrides, **kwargs)


def normal(request: dict[str, Any]) -> dict[str, Any]:
    """Order of tags and of channels has no meaning."""
    found = dict(request)
    for key, by in (("Tags", "Key"), ("InputDataConfig", "ChannelName")):
        found[key] = sorted(found[key], key=lambda it: it[by])
    return found


@pytest.mark.integration
@pytest.mark.parametrize("name", GOLDEN)
def test_the_sdk_sends_what_render_gives(name: str, source: str, cloud: list[Any]) -> None:
    est = built(name, source)
    assert "PyTorch" in [kind.__name__ for kind in type(est).__mro__]
    est.fit(wait=False)
    (sent,) = [arguments for operation, arguments in cloud if operation == "CreateTrainingJob"]
    assert normal(sent) == normal(est._staged.request)


@pytest.mark.integration
def test_nothing_is_stored_before_fit_and_everything_by_it(source: str, cloud: list[Any]) -> None:
    import boto3

    est = built("script", source)
    s3 = boto3.client("s3")
    assert "Contents" not in s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/")
    est.fit(wait=False)
    keys = {it["Key"] for it in s3.list_objects_v2(Bucket=BUCKET, Prefix="runs/")["Contents"]}
    run = est.run_uri.removeprefix(f"s3://{BUCKET}/")
    assert {f"{run}/run.json", f"{run}/job/attempt-1/job.json"} <= keys
    assert any(key.endswith("sourcedir.tar.gz") for key in keys)


@pytest.mark.integration
def test_each_fit_is_a_run_of_its_own(source: str, cloud: list[Any]) -> None:
    est = built("script", source)
    est.fit(wait=False)
    first = est.run_uri
    est.fit({"more": f"s3://{BUCKET}/more"}, wait=False)
    assert est.run_uri != first
    names = [arguments["TrainingJobName"] for operation, arguments in cloud if operation == "CreateTrainingJob"]
    assert len(set(names)) == 2
    channels = {it["ChannelName"] for it in cloud[-1][1]["InputDataConfig"]}
    assert channels == {"data", "shared", "job", "more"}


@pytest.mark.integration
def test_arguments_of_the_estimator_win(source: str, cloud: list[Any]) -> None:
    est = built("script", source, max_run=60, hyperparameters={"task.checkpoint_folder": "ck"})
    est.fit(wait=False)
    sent = cloud[-1][1]
    assert sent["StoppingCondition"]["MaxRuntimeInSeconds"] == 60
    assert sent["HyperParameters"]["task.checkpoint_folder"] == '"ck"'


@pytest.mark.integration
@pytest.mark.parametrize("name", ["llama-2-7b fsdp", "script"])
def test_an_administrators_defaults_reach_both_alike(
    name: str, source: str, cloud: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = {
        "SchemaVersion": "1.0",
        "SageMaker": {
            "TrainingJob": {
                "Environment": {"FROM_ADMIN": "1"},
                "Tags": [{"Key": "cost", "Value": "42"}],
                "EnableInterContainerTrafficEncryption": True,
                "OutputDataConfig": {"KmsKeyId": "alias/admin"},
                "VpcConfig": {"Subnets": ["subnet-0c"], "SecurityGroupIds": ["sg-0d"]},
            }
        },
    }
    (tmp_path / "config.yaml").write_text(json.dumps(defaults))
    monkeypatch.setenv("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", str(tmp_path / "config.yaml"))
    est = built(name, source)
    est.fit(wait=False)
    sent = cloud[-1][1]
    assert normal(sent) == normal(est._staged.request)
    assert sent["Environment"]["FROM_ADMIN"] == "1"
    assert {"Key": "cost", "Value": "42"} in sent["Tags"]
    assert sent["OutputDataConfig"]["KmsKeyId"] == "alias/admin"


@pytest.mark.integration
def test_DL10_a_tuner_starts_the_same_processes_and_reads_the_same_job(source: str, cloud: list[Any]) -> None:
    from sagemaker.tuner import ContinuousParameter, HyperparameterTuner

    est = built("llama-2-70b smp", source, "backend.remote_debug=false")
    tuner = HyperparameterTuner(
        est,
        "train:loss",
        {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)},
        metric_definitions=est.metric_definitions,
        objective_type="Minimize",
        max_jobs=2,
    )
    tuner.fit(est.channels, wait=False)
    (sent,) = [arguments for operation, arguments in cloud if operation == "CreateHyperParameterTuningJob"]
    trial, own = sent["TrainingJobDefinition"], est._staged.request
    for key in (
        "sagemaker_torch_distributed_enabled",
        "mp_parameters",
        "sagemaker_program",
        "sagemaker_submit_directory",
    ):
        assert trial["StaticHyperParameters"][key] == own["HyperParameters"][key]
    assert normal({**trial, "Tags": []})["InputDataConfig"] == normal(own)["InputDataConfig"]
    resources = trial.get("ResourceConfig") or trial["HyperParameterTuningResourceConfig"]
    assert {name: resources[name] for name in own["ResourceConfig"]} == own["ResourceConfig"]


@pytest.mark.integration
def test_a_training_step_of_a_pipeline_is_byte_identical_every_time(source: str, cloud: list[Any]) -> None:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    def definition() -> str:
        session = PipelineSession(default_bucket=BUCKET)
        est = built("script", source, sagemaker_session=session)
        pipeline = Pipeline("p", steps=[TrainingStep("train", step_args=est.fit())], sagemaker_session=session)
        return str(pipeline.definition())

    first = definition()
    assert first == definition()
    arguments = json.loads(first)["Steps"][0]["Arguments"]
    assert {it["ChannelName"] for it in arguments["InputDataConfig"]} == {"data", "shared", "job"}


def steps_of(source: str, *fits: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """Requests of the steps of a hand-written pipeline, one for each input of ``fit``."""
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    session = PipelineSession(default_bucket=BUCKET)
    est = built("script", source, sagemaker_session=session, **kwargs)
    steps = [TrainingStep(f"s{number}", step_args=est.fit(given)) for number, given in enumerate(fits)]
    definition = json.loads(Pipeline("p", steps=steps, sagemaker_session=session).definition())
    return [step["Arguments"] for step in definition["Steps"]]


@pytest.mark.integration
def test_C12_two_steps_that_would_publish_at_one_address_are_refused(source: str, cloud: list[Any]) -> None:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    with pytest.raises(PlanError, match=r"steps\.s1: its run would lie where that of s0 does.*name=s1"):
        steps_of(source, None, None)
    session = PipelineSession(default_bucket=BUCKET)
    both = [
        built("script", source, sagemaker_session=session),
        built("script", source, "name=s1", sagemaker_session=session),
    ]
    steps = [TrainingStep(f"s{number}", step_args=est.fit()) for number, est in enumerate(both)]
    assert Pipeline("p", steps=steps, sagemaker_session=session).definition()


@pytest.mark.integration
@pytest.mark.parametrize("joined", [False, True])
def test_C12_a_step_that_reads_the_address_of_another_must_wait_for_it(
    source: str, cloud: list[Any], joined: bool
) -> None:
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    session = PipelineSession(default_bucket=BUCKET)
    label = ParameterString("Label", "a")
    variables = {"environment": {"LABEL": label}} if joined else {}
    first = built("script", source, sagemaker_session=session, **variables)
    second = built("script", source, "name=second", sagemaker_session=session)
    one = TrainingStep("one", step_args=first.fit())

    def definition(**order: Any) -> str:
        two = TrainingStep("two", step_args=second.fit({"model": first.result_uri}), **order)
        text: str = Pipeline("p", [label], steps=[one, two], sagemaker_session=session).definition()
        return text

    assert isinstance(first.run_uri, str) is not joined
    with pytest.raises(PlanError, match=r"steps\.two\.model: reads what one publishes.*depends_on=\['one'\]"):
        definition()
    assert definition(depends_on=["one"])


def address_of(request: dict[str, Any]) -> Any:
    """Where a step's run lies, by its tag, which agrees with what its worker reads."""
    (tag,) = [it["Value"] for it in request["Tags"] if it["Key"] == "sm_llm:run"]
    sent = request["HyperParameters"].get("sm_llm_run")
    if sent is not None:
        reported = json.loads(sent) if isinstance(sent, str) else sent
        assert reported == tag
    return tag


@pytest.mark.integration
def test_f01_the_address_of_a_hand_written_step_follows_all_that_it_is_given(source: str, cloud: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString

    (plain,) = steps_of(source, None)
    assert "sm_llm_run" not in plain["HyperParameters"], "the specification alone is in the address already"
    other, data = TrainingInput("s3://data-bkt/other/"), ParameterString("Data", "s3://data-bkt/some/")
    first, second, third = steps_of(source, {"train": TrainingInput("s3://data-bkt/some/")}, {"train": other}, None)
    (fourth,) = steps_of(source, {"train": TrainingInput(data)})
    count = ParameterInteger("Count", 3)
    (fifth,) = steps_of(source, None, hyperparameters={"task.output_folder": "a"})
    (sixth,) = steps_of(source, None, hyperparameters={"task.output_folder": "b"})
    (seventh,) = steps_of(source, None, environment={"COUNT": count.to_string()})
    addresses = [address_of(it) for it in (plain, first, second, fourth, fifth, sixth, seventh)]
    assert len({json.dumps(it) for it in addresses}) == len(addresses)
    assert address_of(third) == address_of(plain), "each fit is a step of its own"
    counted = {"Std:Join": {"On": "", "Values": [{"Get": "Parameters.Count"}]}}
    for request, expression in ((fourth, {"Get": "Parameters.Data"}), (seventh, counted)):
        join = address_of(request)["Std:Join"]
        assert join["On"] == "/"
        assert join["Values"][0].startswith(f"{address_of(plain)}/")
        assert join["Values"][1:] == [expression]


@pytest.mark.integration
@pytest.mark.parametrize("is_pipeline", [True, False])
def test_S12_10_whatever_reads_an_estimator_without_fit_is_refused(
    is_pipeline: bool, source: str, cloud: list[Any]
) -> None:
    """Also after ``fit`` of the estimator; ``fit`` of estimator and tuner work, as steps and at once."""
    from sagemaker.tuner import ContinuousParameter, HyperparameterTuner
    from sagemaker.workflow import airflow
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep, TuningStep

    session = PipelineSession(default_bucket=BUCKET) if is_pipeline else None
    est = built("llama-2-70b smp", source, "backend.remote_debug=false", sagemaker_session=session)
    ranges = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}
    tuner = HyperparameterTuner(est, "train:loss", ranges, objective_type="Minimize", max_jobs=2)
    several = HyperparameterTuner.create({"a": est}, {"a": "train:loss"}, {"a": ranges}, objective_type="Minimize")
    several.estimator_dict["a"] = est
    tuned, fitted = tuner.fit(wait=False), est.fit(wait=False)
    if is_pipeline:
        steps = [TrainingStep("a", step_args=fitted), TuningStep("b", step_args=tuned)]
        pipeline = Pipeline("p", steps=steps, sagemaker_session=session)
        assert [len(json.loads(pipeline.definition())["Steps"]) for _ in range(2)] == [2, 2]
    else:
        assert {operation for operation, _ in cloud} == {"CreateTrainingJob", "CreateHyperParameterTuningJob"}
    fresh = built("llama-2-70b smp", source, "backend.remote_debug=false", sagemaker_session=session)
    unfitted = HyperparameterTuner(fresh, "train:loss", ranges, objective_type="Minimize", max_jobs=2)
    wrong = TuningStep("a", tuner=unfitted)
    for read in (
        lambda: TrainingStep("a", estimator=est, inputs={"corpus": "s3://data-bkt/other"}).arguments,
        lambda: Pipeline("p", steps=[wrong], sagemaker_session=est.sagemaker_session).definition(),
        lambda: TuningStep("a", tuner=several).arguments,
        lambda: airflow.training_config(est),
        lambda: airflow.tuning_config(unfitted, None),
    ):
        with pytest.raises(PlanError, match=r"^estimator: is used without fit.* step_args=estimator\.fit\(inputs\)"):
            read()


@pytest.mark.integration
def test_S12_11_the_address_of_a_step_follows_its_program(source: str, cloud: list[Any]) -> None:
    from pathlib import Path

    from sagemaker.workflow.pipeline_context import PipelineSession

    def address() -> str:
        return str(built("script", source, sagemaker_session=PipelineSession(default_bucket=BUCKET)).run_uri)

    before = address()
    assert address() == before
    (Path(source) / "x.py").write_text("print(2)\n")
    assert address() != before


@pytest.mark.integration
def test_telemetry_is_off_even_for_a_session_that_was_given(
    source: str, cloud: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sagemaker
    from sagemaker.telemetry import telemetry_logging

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the SDK calls home")

    monkeypatch.setattr(telemetry_logging, "_send_telemetry_request", fail)
    built("script", source, sagemaker_session=sagemaker.Session(default_bucket=BUCKET)).fit(wait=False)


def test_distribution_alone() -> None:
    found = distribution(GOLDEN["llama-2-70b smp"])
    assert found["torch_distributed"] == {"enabled": True}
    parameters = found["smdistributed"]["modelparallel"]["parameters"]
    assert (parameters["hybrid_shard_degree"], parameters["tensor_parallel_degree"]) == (32, 4)
    assert distribution(GOLDEN["prepare"]) == {}


def test_without_the_sdk_one_line_reports_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sagemaker.pytorch", None)  # as with version 3, which has no such module
    with pytest.raises(SubmitError, match=r"pip install 'sm_llm\[sagemaker\]'"):
        estimator(GOLDEN["prepare"])
    with pytest.raises(SubmitError, match=r"pip install 'sm_llm\[sagemaker\]'"):
        build_pipeline("no workflow is read")


def test_a_job_of_this_machine_has_no_estimator() -> None:
    local = {**GOLDEN["prepare"], "backend": {"name": "local"}, "compute": {}}
    with pytest.raises(PlanError, match="an estimator is for a training job of SageMaker"):
        estimator(local)


@pytest.mark.integration
def test_arguments_that_are_fields_change_the_job_that_the_worker_reads(source: str, cloud: list[Any]) -> None:
    """Else the request would start other machines than job.json names, and unchecked."""
    est = built(
        "llama-2-7b fsdp", source, instance_count=4, max_run=7200, environment={"MODE": "x"},
        tags=[{"Key": "cost", "Value": "7"}], enable_remote_debug=True,
    )  # fmt: skip
    est.fit(wait=False)
    sent = cloud[-1][1]
    assert normal(sent) == normal(est._staged.request)
    spec = est._staged.submission.job.spec
    assert (spec.compute.instance_count, spec.backend.max_run_seconds) == (4, 7200)
    assert sent["ResourceConfig"]["InstanceCount"] == 4
    assert sent["Environment"].items() >= {"FI_PROVIDER": "efa", "MODE": "x"}.items()
    tags = {tag["Key"]: tag["Value"] for tag in sent["Tags"]}
    assert (tags["cost"], tags["team"], tags["sm_llm:run"]) == ("7", "x", est.run_uri)


@pytest.mark.integration
def test_hyperparameters_come_beside_those_that_start_the_processes(source: str, cloud: list[Any]) -> None:
    given = {"environment.NOTE": 'it\'s "q"\n日本', "task.args": ["a b", "", "1e-4"]}
    est = built("script", source, "compute.processes_per_instance=1", "compute.instance_type=ml.g5.12xlarge",
                hyperparameters=given)  # fmt: skip
    est.fit(wait=False)
    sent = cloud[-1][1]["HyperParameters"]
    assert sent["sagemaker_mpi_num_of_processes_per_host"] == "1"
    assert {name: json.loads(sent[name]) for name in given} == given


@pytest.mark.integration
def test_what_cannot_be_sent_is_refused_before_anything_is_stored(source: str, cloud: list[Any]) -> None:
    import boto3

    est = built("prepare", source)
    for action in (
        lambda: est.fit({"job": f"s3://{BUCKET}/x"}, wait=False),
        lambda: est.fit("/data/corpus", wait=False),
        lambda: est.fit(wait=False, job_name="my_job x"),
        lambda: est.set_hyperparameters(**{"task.seq_lenght": 5}),
        lambda: built("prepare", source, hyperparameters={"lr": 1}),
        lambda: built("prepare", source, instance_type="ml.m5.2xlage"),
    ):
        with pytest.raises((PlanError, SpecError)):
            action()
    assert "Contents" not in boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="runs/")


@pytest.mark.integration
def test_a_second_fit_and_a_job_name_of_ones_own_are_found_by_their_runs(source: str, cloud: list[Any]) -> None:
    from sm_llm.runs.run_store import run_store_at

    est = built("prepare", source)
    est.fit(wait=False)
    est.fit(wait=False, job_name="mine")
    sent = cloud[-1][1]
    assert {"Key": "sm_llm:run", "Value": est.run_uri} in sent["Tags"]
    assert run_store_at(est.run_uri).record().attempts[0].native_id == "us-east-1/mine"


@pytest.mark.parametrize("name", ["dependencies", "source_dir", "entry_point"])
def test_SR05_code_that_would_be_packed_and_never_read_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=rf"{name}: has no effect") as caught:
        estimator(GOLDEN["prepare"], **{name: ["requirements.txt"]})
    assert "task." in str(caught.value)
