"""Further uses of estimators and tuners that had no effect, or another than the meant one, with the real SDK."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sagemaker.parameter import CategoricalParameter, ContinuousParameter, IntegerParameter

from sm_llm.errors import RunFailed
from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator
from sm_llm.launcher.find_runs import attach
from sm_llm.runs.outcome import STARTING_SECONDS
from sm_llm.runs.run_states import RunState
from tests.fixtures.sagemaker_calls import BUCKET, TRAIN, calls, job
from tests.launcher.test_estimator_arguments import refused
from tests.launcher.test_tuner_checks import RATE, tuned

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["calls"]
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:We are deprecating:DeprecationWarning")]

DATA = f"s3://{BUCKET}/train/"
SCRIPT = {"kind": "script", "entry": "-m x"}
ROWS = {**TRAIN, "data": {"format": "rows", "seq_length": 16, "train": "inputs.train"}}


def pipeline_session() -> Any:
    from sagemaker.workflow.pipeline_context import PipelineSession

    return PipelineSession(default_bucket=BUCKET)


def defined(*steps: Any, session: Any) -> dict[str, Any]:
    from sagemaker.workflow.pipeline import Pipeline

    return dict(json.loads(Pipeline("p", steps=list(steps), sagemaker_session=session).definition()))


def job_files() -> list[dict[str, Any]]:
    """The job files in the bucket."""
    import boto3

    client = boto3.client("s3")
    keys = [it["Key"] for it in client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]
    bodies = [client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys if key.endswith("/job.json")]
    return [json.loads(it) for it in bodies]


@pytest.mark.parametrize("is_pipeline", [True, False])
def test_S12_10_a_tuner_that_was_fitted_is_refused_as_a_step_of_its_own(is_pipeline: bool, calls: list[Any]) -> None:
    import sagemaker
    from sagemaker.workflow.steps import TuningStep

    session = pipeline_session() if is_pipeline else sagemaker.Session(default_bucket=BUCKET)
    tuner = tuned(RATE, est=estimator(job(), sagemaker_session=session))
    given = tuner.fit(wait=False)
    if is_pipeline:
        (step,) = defined(TuningStep("a", step_args=given), session=session)["Steps"]
        assert step["Type"] == "Tuning"
    refused(lambda: defined(TuningStep("b", tuner=tuner), session=session), "estimator: is used without fit")


def test_S12_23_a_run_whose_job_was_refused_has_failed_with_the_services_words(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import botocore.client
    from botocore.exceptions import ClientError

    def call(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        if operation in ("CreateTrainingJob", "DescribeTrainingJob"):
            text = "no\n such image" if operation.startswith("Create") else "Requested resource not found."
            error = {"Error": {"Code": "ValidationException", "Message": text}}
            raise ClientError({**error, "ResponseMetadata": {"HTTPStatusCode": 400}}, operation)  # type: ignore[typeddict-item]
        return original(self, operation, arguments)

    original = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]
    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
    est = estimator(job())
    with pytest.raises(ClientError):
        est.fit(wait=False)
    run = attach(est.run_uri)
    with pytest.raises(RunFailed, match=r"its training job was not created: .*no such image"):
        run.wait()
    assert run.state is RunState.FAILED


def test_S12_23_nobody_waits_for_a_run_that_was_never_started(calls: list[Any]) -> None:
    est = estimator(job())
    est._staged.store()
    run = attach(est.run_uri)
    assert run.describe() == (RunState.PENDING, "is being started")
    early = run.record.model_copy(update={"created": run.record.created - STARTING_SECONDS})
    run.run_store.update(lambda held: early)
    with pytest.raises(RunFailed, match="was never started"):
        run.wait()


def test_S12_23_a_step_waits_for_its_pipeline(calls: list[Any]) -> None:
    from sagemaker.workflow.steps import TrainingStep

    est = estimator(job(), sagemaker_session=pipeline_session())
    defined(TrainingStep("a", step_args=est.fit(wait=False)), session=est.sagemaker_session)
    run = attach(est.run_uri)
    early = run.record.model_copy(update={"created": run.record.created - STARTING_SECONDS})
    run.run_store.update(lambda held: early)
    assert run.describe() == (RunState.PENDING, "its pipeline has not started it yet")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"banana": 1}, "is not an argument of fit"),
        ({"experiment_config": {"Foo": "x"}}, "experiment_config"),
        ({"experiment_config": "x"}, "experiment_config"),
        ({"logs": "Al"}, "Write All"),
    ],
)
def test_S12_23_options_of_fit_are_checked_before_anything_is_stored(
    options: dict[str, Any], words: str, calls: list[Any]
) -> None:
    refused(lambda: estimator(job()).fit(wait=False, **options), words)
    assert not job_files()
    assert not calls


def test_S12_12_inputs_of_fit_are_looked_up_in_s3(calls: list[Any]) -> None:
    spec = job(task=ROWS, inputs={"train": DATA})
    est = estimator(spec)
    missing = f"s3://{BUCKET}/nowhere"
    refused(lambda: est.fit({"train": missing}, wait=False), "inputs.train", "is not there")
    refused(lambda: est.fit({"train": "s3://no-such-bucket-of-ours/x"}, wait=False), "inputs.train", "does not exist")
    assert not calls
    assert not job_files()
    est.fit(wait=False)
    assert len(calls) == 1
    refused(lambda: estimator(job(task=ROWS, inputs={"train": missing})).fit(wait=False), "inputs.train")


def test_S12_12_inputs_of_a_steps_fit_are_those_of_its_job_file(calls: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.steps import TrainingStep

    session = pipeline_session()
    est = estimator(job(task=SCRIPT, inputs={"train": DATA}), sagemaker_session=session)
    other = TrainingInput(
        f"s3://{BUCKET}/list.manifest", distribution="ShardedByS3Key", s3_data_type="ManifestFile", input_mode="File"
    )
    fixed = TrainingStep("a", step_args=est.fit({"train": other}, wait=False))
    variable = TrainingStep("b", step_args=est.fit({"train": ParameterString("Data", DATA)}, wait=False))
    steps = defined(fixed, variable, session=session)["Steps"]
    seen = {it["run_id"]: it["spec"]["inputs"]["train"] for it in job_files()}
    runs = {it["Name"]: it["Arguments"] for it in steps}

    def run_of(step: str) -> Any:
        return next(it["Value"] for it in runs[step]["Tags"] if it["Key"] == "sm_llm:run")

    assert seen[run_of("a").rpartition("/")[2]] == {
        "uri": f"s3://{BUCKET}/list.manifest", "mode": "File", "distribution": "ShardedByS3Key",
        "data_type": "ManifestFile",
    }  # fmt: skip
    (sent,) = [it for it in runs["a"]["InputDataConfig"] if it["ChannelName"] == "train"]
    assert sent["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "ShardedByS3Key"
    assert sent["DataSource"]["S3DataSource"]["S3Uri"] == f"s3://{BUCKET}/list.manifest"
    assert {"Get": "Parameters.Data"} in run_of("b")["Std:Join"]["Values"]


def test_S12_12_a_sharded_input_is_part_of_the_job(calls: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput

    est = estimator(job(task=SCRIPT))
    est.fit({"train": TrainingInput(DATA, distribution="ShardedByS3Key")}, wait=False)
    assert est.plan.job.inputs["train"].distribution == "ShardedByS3Key"
    (channel,) = [it for it in calls[-1][1]["InputDataConfig"] if it["ChannelName"] == "train"]
    assert channel["DataSource"]["S3DataSource"]["S3DataDistributionType"] == "ShardedByS3Key"


def test_S12_14_two_inputs_of_fit_under_one_variable_are_refused(calls: list[Any]) -> None:
    est = estimator(job(task=SCRIPT, inputs={"a-b": DATA}))
    refused(lambda: est.fit({"a_b": DATA}, wait=False), "inputs.a_b", "where it finds a-b")
    refused(lambda: est.fit({"c": DATA, "C": DATA}, wait=False), "inputs.C", "where it finds c")


@pytest.mark.parametrize(
    ("value", "words"),
    [("", "is empty"), ("a?b*c", "the tag of a job cannot"), ("x" * 400, "takes 256"), ("a/../b", "'.' or '..'")],
)
def test_S12_28_variables_that_make_no_address_are_refused(value: str, words: str, calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterString

    est = estimator(job(), sagemaker_session=pipeline_session(), environment={"A": ParameterString("B", value)})
    refused(lambda: est.fit(wait=False), words)


def test_S12_27_a_result_below_an_address_in_an_address_is_refused(calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterString

    session = pipeline_session()
    est = estimator(job(task=ROWS, inputs={"train": DATA}), sagemaker_session=session)
    est.fit({"train": ParameterString("Data", DATA)}, wait=False)
    refused(lambda: est.result_uri, "estimator.result_uri", "S3ModelArtifacts")
    est = estimator(job(), sagemaker_session=session, environment={"A": ParameterString("B", "x")})
    est.fit(wait=False)
    assert "Parameters.B" in json.dumps(est.result_uri.expr)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("task.global_batch_size", IntegerParameter(2, 8), "CategoricalParameter([2, 4, 6, 8])"),
        ("task.model.config.num_attention_heads", IntegerParameter(2, 8), "CategoricalParameter([2, 4, 8])"),
        ("task.model.config.hidden_size", IntegerParameter(32, 64), "CategoricalParameter([32, 36, "),
        ("task.logging.every_steps", IntegerParameter(1, 5), "changes nothing in the result"),
        ("task.checkpoint.every_steps", IntegerParameter(1, 5), "changes nothing in the result"),
        ("task.optim.min_learning_rate", ContinuousParameter(1e-6, 1e-4), "no effect with schedule constant"),
    ],
)
def test_S12_30_S12_32_ranges_of_which_some_values_fail_or_none_has_an_effect(
    name: str, value: Any, words: str, calls: list[Any]
) -> None:
    task = {**TRAIN, "micro_batch_size": 2, "global_batch_size": 4, "optim": {"schedule": "constant"}}
    refused(lambda: tuned({name: value}, est=estimator(job(task=task))).fit(wait=False), name, words)


def test_S12_30_a_wide_range_of_which_all_values_work_is_accepted(calls: list[Any]) -> None:
    tuned({"task.max_steps": IntegerParameter(10, 10_000)}).fit(wait=False)
    assert calls


def test_S12_31_S12_32_what_a_tuning_job_does_not_have_is_refused(calls: list[Any]) -> None:
    est = estimator(job(), enable_sagemaker_metrics=True)
    refused(lambda: tuned(RATE, est=est).fit(wait=False), "enable_sagemaker_metrics", "has no effect")
    refused(lambda: tuned(RATE, objective=None).fit(wait=False), "objective_metric_name", "is missing")  # type: ignore[arg-type]
    many = {f"environment.A{number}": CategoricalParameter(["x", "y"]) for number in range(31)}
    refused(lambda: tuned(many).fit(wait=False), "hyperparameter_ranges: has 31 ranges")


@pytest.mark.parametrize("tag", [None, "2.10.0-cpu-py313-ubuntu22.04-sagemaker"])
def test_S12_38_a_tuning_job_can_be_attached_to(
    tag: str | None, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import botocore.client
    import sagemaker
    from sagemaker.pytorch import PyTorch
    from sagemaker.tuner import HyperparameterTuner

    image = f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:{tag}"
    own = {} if tag is None else {"backend": {"image": "stock", "image_uri": image}}
    session = sagemaker.Session(default_bucket=BUCKET)
    tuned(RATE, est=estimator(job(**own), sagemaker_session=session)).fit(wait=False)
    (sent,) = [arguments for operation, arguments in calls if operation == "CreateHyperParameterTuningJob"]
    answer = json.loads(json.dumps(sent))
    answer["HyperParameterTuningJobConfig"].setdefault("TrainingJobEarlyStoppingType", "Off")
    original = botocore.client.BaseClient._make_api_call  # type: ignore[attr-defined]

    def call(self: Any, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "DescribeHyperParameterTuningJob":
            return answer
        return original(self, operation, arguments)

    described = answer["TrainingJobDefinition"]
    described["StaticHyperParameters"].setdefault("_tuning_objective_metric", "train:loss")  # as the service answers
    described["ResourceConfig"] = described["HyperParameterTuningResourceConfig"]
    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", call)
    tuner = HyperparameterTuner.attach(sent["HyperParameterTuningJobName"], sagemaker_session=session)
    assert type(tuner.estimator) is PyTorch
    assert tuner.hyperparameter_ranges()["ContinuousParameterRanges"][0]["Name"] == "task.optim.learning_rate"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (lambda est: est.deploy(1, "ml.m5.large"), "a step of the kind register"),
        (lambda est: est.transformer(1, "ml.m5.large"), "a step of the kind register"),
        (lambda est: est.register(["a"], ["b"], ["c"], ["d"], "g"), "a step of the kind register"),
        (lambda est: est.create_model(), "model_data="),
        (lambda est: est.update_profiler(rules=[]), "task.logging.profile"),
        (lambda est: est.enable_remote_debug(), "backend.remote_debug"),
    ],
)
def test_S12_21_methods_that_cannot_work_name_what_does(method: Any, words: str, calls: list[Any]) -> None:
    est = estimator(job())
    refused(lambda: method(est), "estimator.", words)


def test_S12_41_what_is_not_a_session_and_the_local_mode_are_refused(tmp_path: Path, calls: list[Any]) -> None:
    from sagemaker.local import LocalSession

    refused(lambda: estimator(job(), sagemaker_session="x"), "sagemaker_session: is not a session", "str")
    local = object.__new__(LocalSession)  # its __init__ wants docker
    refused(
        lambda: estimator(job(), sagemaker_session=local), "sagemaker_session: ", "local mode", "contract=sagemaker"
    )
    refused(lambda: estimator(job(), instance_groups=[{"name": "a"}]), "instance_groups: must be a list")
    refused(lambda: estimator(job(), instance_groups="x"), "[sagemaker.instance_group.InstanceGroup('name'")


def test_C8_several_groups_which_the_sdk_does_not_distribute_over_are_refused_in_words(calls: list[Any]) -> None:
    from sagemaker.instance_group import InstanceGroup

    names = ["a", "b"]
    for kinds in (["ml.m5.large", "ml.c5.large"], ["ml.m5.2xlarge", "ml.m5.2xlarge"]):
        groups = [InstanceGroup(name, kind, 1) for name, kind in zip(names, kinds, strict=True)]
        spec = job(compute={"processes_per_instance": 1})
        refused(
            lambda spec=spec, it=groups: estimator(spec, instance_groups=it), "in one group only", "sm_llm.launch()"
        )
    written = [{"name": name, "instance_type": "ml.m5.2xlarge", "instance_count": 1} for name in names]
    kind = {"instance_type": "ml.m5.2xlarge", "instance_count": 2, "processes_per_instance": 1}
    spec = job(compute=kind, backend={"instance_groups": written})
    refused(lambda: estimator(spec), "backend.instance_groups: has several groups", "['a', 'b']")
    assert estimator(job(), instance_groups=[InstanceGroup("a", "ml.m5.2xlarge", 1)]).instance_groups


@pytest.mark.parametrize(
    ("overrides", "given", "where"),
    [
        (("compute.instance_count=2",), {"instance_count": 3}, "compute.instance_count"),
        ((), {"instance_count": 3, "fields": {"compute": {"instance_count": 2}}}, "compute.instance_count"),
        (
            (), {"environment": {"A": "1"}, "hyperparameters": {"environment.A": "2"}}, "hyperparameters.environment.A",
        ),
        ((), {"environment": {"A": "1"}, "fields": {"environment": {"B": "2"}}}, "environment.A"),
        (("task.max_steps=5",), {"hyperparameters": {"task.max_steps": 6}}, "hyperparameters.task.max_steps"),
    ],
)  # fmt: skip
def test_S12_42_a_value_that_one_call_gives_twice_is_refused(
    overrides: tuple[str, ...], given: dict[str, Any], where: str, calls: list[Any]
) -> None:
    refused(lambda: estimator(job(), *overrides, **given), f"{where}: is given twice")
    estimator(job(environment={"A": "0"}), "environment.B=1", environment={"C": "2"})


def test_S12_18_names_that_pipelines_replace_are_warned_of(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    est = estimator(job(), sagemaker_session=pipeline_session(), base_job_name="zz")
    est.fit(wait=False)
    assert "names the jobs of its steps itself" in capsys.readouterr().err
    est = estimator(job(), sagemaker_session=pipeline_session())
    est.fit(wait=False)
    assert "names the jobs" not in capsys.readouterr().err
    est.fit(wait=False, job_name="abc")
    assert "names the jobs of its steps itself" in capsys.readouterr().err


def configured(**job_defaults: Any) -> Any:
    import sagemaker

    config = {"SchemaVersion": "1.0", "SageMaker": {"TrainingJob": job_defaults}}
    return sagemaker.Session(default_bucket=BUCKET, sagemaker_config=config)


@pytest.mark.parametrize(
    ("defaults", "words"),
    [
        ({"Environment": {"RANK": "5"}}, "environment.RANK"),
        ({"EnableNetworkIsolation": True}, "EnableNetworkIsolation"),
        ({"VpcConfig": {"Subnets": ["sg-9"], "SecurityGroupIds": ["sg-9"]}}, "backend.vpc.subnets"),
        (
            {"OutputDataConfig": {"KmsKeyId": "arn:aws:kms:eu-west-1:111122223333:key/x"}},
            "backend.output_kms_key_id",
        ),
    ],
)
def test_S12_40_defaults_of_a_session_are_checked_as_those_of_files(
    defaults: dict[str, Any], words: str, calls: list[Any]
) -> None:
    error = refused(lambda: estimator(job(), sagemaker_session=configured(**defaults)), words)
    assert "sagemaker_session.sagemaker_config" in str(error)


def test_S12_40_defaults_of_a_session_are_part_of_the_plan(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("{SchemaVersion: '1.0', SageMaker: {TrainingJob: {Environment: {OF_FILE: '1'}}}}\n")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(file))
    network = {"Subnets": ["subnet-9"], "SecurityGroupIds": ["sg-9"]}
    session = configured(Environment={"OF_SESSION": "1"}, VpcConfig=network, EnableInterContainerTrafficEncryption=True)
    est = estimator(job(), sagemaker_session=session)
    assert est.plan.facts["subnets from"] == "sagemaker_session.sagemaker_config"
    est.set_hyperparameters(**{"task.max_steps": 5})
    est.fit(wait=False)
    est.fit(wait=False)
    for _, sent in calls:
        assert sent["VpcConfig"] == network
        assert sent["Environment"] == est.submission.request["Environment"] | {"OF_SESSION": "1"}
        assert "OF_FILE" not in sent["Environment"]
        assert sent["EnableInterContainerTrafficEncryption"] is True
    assert estimator(job()).submission.request["Environment"]["OF_FILE"] == "1"


def test_S12_13_values_of_a_start_are_checked(calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import TrainingStep

    session = pipeline_session()
    data = ParameterString("Data", DATA)
    est = estimator(job(task=ROWS, inputs={"train": DATA}), sagemaker_session=session)
    step = TrainingStep("a", step_args=est.fit({"train": data}, wait=False))
    flow = Pipeline("p", parameters=[data], steps=[step], sagemaker_session=session)

    def begin(name: str, value: str) -> None:
        flow.start({name: value})

    for value, words in {"/tmp/x": "is not in S3", "s3://No/x": "is not in S3", "s3://data-bkt/a?b": "tag"}.items():
        refused(lambda value=value: begin("Data", value), "values.Data", words)
    refused(lambda: begin("Dta", DATA), "values.Dta", "Did you mean Data")
    assert not calls
    begin("Data", f"s3://{BUCKET}/other")
    assert "StartPipelineExecution" in [operation for operation, _ in calls]


def test_S12_40_defaults_of_a_session_are_checked_for_a_built_pipeline(calls: list[Any]) -> None:
    from sagemaker.workflow.pipeline_context import PipelineSession

    from sm_llm.launcher.backends.sagemaker.sdk.pipeline_sdk import build_pipeline

    one = job()
    flow = {**{name: one[name] for name in ("backend", "compute", "storage")}, "name": "flow"}
    flow["steps"] = {"train": {"task": one["task"]}}

    def built(**variables: str) -> Any:
        config = {"SchemaVersion": "1.0", "SageMaker": {"TrainingJob": {"Environment": variables}}}
        session = PipelineSession(default_bucket=BUCKET, sagemaker_config=config)
        return build_pipeline(flow, sagemaker_session=session)

    refused(lambda: built(RANK="5"), "environment.RANK", "sagemaker_session.sagemaker_config")
    (step,) = json.loads(built(MODE="fast").definition())["Steps"]
    assert step["Arguments"]["Environment"]["MODE"] == "fast"
