"""Every argument of an estimator, a tuner and their ``fit``, with the real SDK: it has its effect, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sm_llm.contract.hyperparameters import applied
from sm_llm.errors import PlanError
from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator, pytorch
from sm_llm.launcher.backends.sagemaker.sdk.sdk_effects import EFFECTS, effects_table
from sm_llm.launcher.backends.sagemaker.sdk.sdk_overrides import _parameters, argument_issues
from sm_llm.spec.validation.runner import refuse
from tests.fixtures.sagemaker_calls import BUCKET, ROLE, calls, job

__all__ = ["calls"]
pytestmark = pytest.mark.integration

DOCS = Path(__file__).parents[2] / "docs" / "sagemaker.md"
DATA = f"s3://{BUCKET}/train"
SMP = (f"backend.role={ROLE}", f"storage=s3://{BUCKET}/runs", "backend.region=us-east-1")


def refused(make: Any, *words: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)
    return caught.value


def test_C8_every_argument_of_the_sdk_is_in_the_table_and_no_other() -> None:
    assert set(_parameters(pytorch())) == set(EFFECTS)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ([{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}], "the key 'a' is given 2 times"),
        ([{"key": "a"}], "must have Key and Value"),
        ([{"Key": "a"}], "must have Key and Value"),
        ([{"Key": "a", "Value": "1", "X": "2"}], "must have Key and Value"),
        (["a"], "must have Key and Value"),
    ],
)
def test_C8_tags_are_pairs_with_keys_of_their_own(tags: list[Any], words: str) -> None:
    assert "variable" not in str(refused(lambda: estimator(job(), tags=tags), "tags", words))


def test_C8_an_argument_that_a_later_sdk_adds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(pytorch()):  # type: ignore[misc]
        def __init__(self, warp_speed: bool = False, **kwargs: Any) -> None:
            """Not called."""

    refused(lambda: refuse(argument_issues(Later, {"warp_speed": True})), "warp_speed", "is not known")


def test_C8_the_documented_table_is_the_one_in_the_code() -> None:
    assert effects_table() in DOCS.read_text()


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("container_entry_point", ["python", "wrap.py"], "task.entry"),
        ("container_arguments", ["-s"], "task.args"),
        ("input_mode", "Pipe", "inputs.NAME.mode"),
        ("input_mode", "FastFile", "inputs.NAME.mode"),
        ("checkpoint_s3_uri", DATA, "storage"),
        ("checkpoint_local_path", "/opt/ml/checkpoints", "task.checkpoint_folder"),
        ("model_uri", DATA, "task.start.pretrained"),
        ("model_channel_name", "m", "inputs.NAME"),
        ("debugger_hook_config", True, "task.logging"),
        ("rules", [object()], "task.watchdog"),
        ("profiler_config", object(), "task.logging.profile"),
        ("disable_profiler", False, "task.logging.profile"),
        ("tensorboard_output_config", object(), "task.logging.sinks.tensorboard"),
        ("compiler_config", object(), "task.precision.compile"),
        ("disable_output_compression", False, "Leave it out"),
        ("training_repository_access_mode", "Vpc", "Leave it out"),
        ("enable_network_isolation", True, "Leave it out"),
    ],
)
def test_f06_an_argument_that_bypasses_the_job_is_refused_with_the_right_field(
    name: str, value: Any, instead: str
) -> None:
    refused(lambda: estimator(job(), **{name: value}), name, instead)


@pytest.mark.parametrize(
    "given",
    [
        {"input_mode": "File"}, {"debugger_hook_config": False}, {"disable_profiler": True}, {"source_dir": None},
        {"enable_network_isolation": False}, {"disable_output_compression": True}, {"dependencies": []},
    ],
)  # fmt: skip
def test_C8_what_asks_for_what_the_job_does_anyway_is_accepted(given: dict[str, Any], calls: list[Any]) -> None:
    estimator(job(), **given).fit(wait=False)
    assert calls[-1][1]["AlgorithmSpecification"]["TrainingInputMode"] == "File"


def test_C8_passed_arguments_reach_the_request(calls: list[Any]) -> None:
    rule = {"Name": "mine", "Regex": "mine=(.*)"}
    given = {"enable_infra_check": True, "enable_session_tag_chaining": True, "container_log_level": 10}
    estimator(job(), metric_definitions=[rule], **given).fit(wait=False)
    sent = calls[-1][1]
    assert sent["InfraCheckConfig"] == {"EnableInfraCheck": True}
    assert sent["SessionChainingConfig"] == {"EnableSessionTagChaining": True}
    assert sent["HyperParameters"]["sagemaker_container_log_level"] == "10"
    names = {it["Name"] for it in sent["AlgorithmSpecification"]["MetricDefinitions"]}
    assert names >= {"mine", "train:loss"}


def test_D13_the_metrics_time_series_is_asked_for_as_the_sdk_does(calls: list[Any]) -> None:
    plain = pytorch()(
        "x.py", framework_version="2.8.0", py_version="py312", role=ROLE, instance_count=1, instance_type="ml.m5.large"
    )
    estimator(job()).fit(wait=False)
    wanted = plain.enable_sagemaker_metrics
    assert calls[-1][1]["AlgorithmSpecification"]["EnableSageMakerMetricsTimeSeries"] is wanted is True


def test_f06_a_pipeline_variable_as_a_name_is_refused_in_words() -> None:
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString

    name = ParameterString("Name", "task.max_steps")
    refused(lambda: estimator(job(), hyperparameters={name: 5}), "hyperparameters", "name must be text")
    refused(lambda: estimator(job(), environment={name: "5"}), "environment", "name must be text")
    refused(lambda: estimator(job(), tags=[{"Key": name, "Value": "1"}]), "tags", "name must be text")
    refused(lambda: estimator(job(), base_job_name=name), "base_job_name", "must be a value")
    refused(lambda: estimator(job(), max_run=ParameterInteger("Run", 60)), "max_run", "must be a value")
    est = estimator(job(task={"kind": "script", "entry": "-m x"}))
    refused(lambda: est.fit({name: DATA}), "inputs", "name of a channel must be text")
    refused(lambda: est.fit(job_name=name), "job_name", "must be text")


def test_f06_degrees_as_hyperparameters_are_refused_where_the_request_starts_with_them() -> None:
    smp = {"task.parallelism.tensor_parallel_degree": 4, "task.parallelism.hybrid_shard_degree": 32}
    error = refused(lambda: estimator("llama-2-70b-smp", *SMP, hyperparameters=smp), "settled at launch")
    assert "hyperparameters.task.parallelism.hybrid_shard_degree" in {fault.path for fault in error.issues}


def test_C8_degrees_as_pipeline_variables_are_refused_where_the_request_starts_with_them() -> None:
    from sagemaker.workflow.parameters import ParameterInteger

    path = "task.parallelism.tensor_parallel_degree"
    for variable in (ParameterInteger("TP", 8), ParameterInteger("TP")):
        refused(
            lambda variable=variable: estimator("llama-2-70b-smp", *SMP, hyperparameters={path: variable}),
            f"hyperparameters.{path}: is settled at launch",
        )


def test_C8_a_pipeline_variable_without_a_default_has_a_known_name() -> None:
    import boto3
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString
    from sagemaker.workflow.pipeline_context import PipelineSession

    def made(name: str) -> Any:
        return lambda: estimator(job(), hyperparameters={name: ParameterInteger("V")})

    refused(made("task.max_stesp"), "hyperparameters.task.max_stesp: unknown key", "Did you mean task.max_steps")
    refused(made("compute.instance_count"), "is settled")
    refused(made("environment.RANK"), "hyperparameters.environment.RANK", "torchrun sets it")
    session = PipelineSession(boto3.session.Session(region_name="us-east-1"))
    for given in ({"task.max_steps": ParameterInteger("V")}, {"environment.NOTE": ParameterString("N")}):
        assert estimator(job(), hyperparameters=given, sagemaker_session=session)


def test_f06_degrees_that_do_not_fit_the_machines_are_found_before_they_start() -> None:
    given = {"task.parallelism.tensor_parallel_degree": 3}
    refused(lambda: estimator("llama-2-7b-fsdp", *SMP, hyperparameters=given), "hyperparameters.task.parallelism")


@pytest.mark.parametrize(
    "given", [{"compute.instance_count": 4}, {"task.kind": "script"}, {"task.source": "elsewhere"}], ids=str
)
def test_C8_what_the_request_was_made_from_is_not_a_hyperparameter(given: dict[str, Any]) -> None:
    refused(lambda: estimator(job(), hyperparameters=given), "is settled once a job has been started")


def test_f05_a_channel_beside_random_tokens_is_refused() -> None:
    est = estimator("llama-2-7b-fsdp", *SMP)
    refused(lambda: est.fit({"train": DATA}, wait=False), "RANDOM TOKENS", f"inputs.train={DATA}", "format=rows")


ROWS = {
    "kind": "train", "model": {"preset": "tiny"}, "max_steps": 6,
    "data": {"format": "rows", "train": "inputs.corpus", "seq_length": 16},
}  # fmt: skip


def rows() -> Any:
    return estimator(job(task=ROWS, inputs={"corpus": DATA}))


def test_C7_a_channel_that_the_task_does_not_name_is_refused_and_its_own_may_come_from_elsewhere(
    calls: list[Any],
) -> None:
    refused(lambda: rows().fit({"train": DATA}), "inputs.train", "it reads corpus")
    rows().fit({"corpus": f"s3://{BUCKET}/other"}, wait=False)
    found = {it["ChannelName"]: it["DataSource"]["S3DataSource"]["S3Uri"] for it in calls[-1][1]["InputDataConfig"]}
    assert found["corpus"] == f"s3://{BUCKET}/other"


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"distribution": "ShardedByS3Key"}, "S3DataDistributionType"),
        ({"input_mode": "Pipe"}, "InputMode"),
        ({"compression": "Gzip"}, "CompressionType"),
        ({"record_wrapping": "RecordIO"}, "RecordWrapperType"),
        ({"s3_data_type": "AugmentedManifestFile"}, "S3DataType"),
        ({"attribute_names": ["a"]}, "AttributeNames"),
        ({"content_type": "text/csv"}, "ContentType"),
        ({"instance_groups": ["a"]}, "InstanceGroupNames"),
    ],
    ids=lambda it: str(it),
)
def test_C7_a_setting_of_a_channel_that_would_have_no_effect_is_refused(setting: dict[str, Any], name: str) -> None:
    from sagemaker.inputs import TrainingInput

    refused(lambda: rows().fit({"corpus": TrainingInput(DATA, **setting)}), f"inputs.corpus.{name}")


def test_C8_no_channel_of_a_script_is_a_pipe_and_the_rest_is_its_own(calls: list[Any]) -> None:
    from sagemaker.inputs import FileSystemInput, TrainingInput

    est = estimator(job(task={"kind": "script", "entry": "-m x"}))
    refused(lambda: est.fit(TrainingInput(DATA, input_mode="Pipe")), "inputs.training.InputMode")
    refused(lambda: est.fit({"a": FileSystemInput("fs-12345678", "EFS", "/x")}), "inside its network")
    est.fit({"a": TrainingInput(DATA, distribution="ShardedByS3Key", content_type="text/csv")}, wait=False)
    (sent,) = [it for it in calls[-1][1]["InputDataConfig"] if it["ChannelName"] == "a"]
    assert (sent["ContentType"], sent["DataSource"]["S3DataSource"]["S3DataDistributionType"]) == (
        "text/csv", "ShardedByS3Key",
    )  # fmt: skip


def tuned(est: Any, ranges: dict[Any, Any], objective: Any = "train:loss", **more: Any) -> Any:
    from sagemaker.tuner import HyperparameterTuner

    tuner = HyperparameterTuner(est, objective, ranges, objective_type="Minimize", max_jobs=2, **more)
    tuner.fit(wait=False)
    return tuner


def trial(sent: dict[str, Any]) -> dict[str, Any]:
    definition: dict[str, Any] = sent["TrainingJobDefinition"]
    return definition


def test_f03_categories_of_numbers_flags_lists_and_nothing_arrive_as_what_they_are(calls: list[Any]) -> None:
    from sagemaker.tuner import CategoricalParameter

    wanted: dict[str, list[Any]] = {
        "task.optim.weight_decay": [0.0, 0.1],
        "task.deterministic": [True, False],
        "task.max_steps": [5, 7],
        "task.optim.betas": [[0.9, 0.95], [0.9, 0.99]],
        "task.global_batch_size": [None, 4],
        "task.data.shuffle": [True],
        "environment.NOTE": ["0.1", "it's"],
    }
    est = estimator(job("tune"))
    tuned(est, {name: CategoricalParameter(values) for name, values in wanted.items()})
    ranges = calls[-1][1]["HyperParameterTuningJobConfig"]["ParameterRanges"]["CategoricalParameterRanges"]
    for found in ranges:
        for text, value in zip(found["Values"], wanted[found["Name"]], strict=True):
            changed, _ = applied(est.submission.job, {found["Name"]: text})
            read: Any = changed.spec.model_dump()
            for key in found["Name"].split("."):
                read = read[key]
            assert (list(read) if isinstance(read, tuple) else read) == value


def test_C8_a_tuner_gets_the_metric_rules_the_inputs_and_the_specs_name(calls: list[Any]) -> None:
    from sagemaker.tuner import ContinuousParameter

    est = estimator(job("my-tune", task=ROWS, inputs={"corpus": DATA}))
    tuner = tuned(est, {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)})
    operation, sent = calls[-1]
    assert operation == "CreateHyperParameterTuningJob"
    assert sent["HyperParameterTuningJobName"].startswith("my-tune-")
    assert tuner.latest_tuning_job.name == sent["HyperParameterTuningJobName"]
    names = {it["Name"] for it in trial(sent)["AlgorithmSpecification"]["MetricDefinitions"]}
    assert names >= {"train:loss", "validation:loss"}
    assert {it["ChannelName"] for it in trial(sent)["InputDataConfig"]} == {"corpus", "job"}


def test_C8_a_tuner_of_several_estimators_is_prepared_alike(calls: list[Any]) -> None:
    from sagemaker.tuner import ContinuousParameter, HyperparameterTuner

    both = {"a": estimator(job("first")), "b": estimator(job("second"))}
    ranges = {name: {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)} for name in both}
    tuner = HyperparameterTuner.create(both, dict.fromkeys(both, "train:loss"), ranges, objective_type="Minimize")
    tuner.fit(include_cls_metadata={}, wait=False)
    for one in calls[-1][1]["TrainingJobDefinitions"]:
        assert "train:loss" in {it["Name"] for it in one["AlgorithmSpecification"]["MetricDefinitions"]}


def test_C8_a_tuners_own_metric_rules_are_kept(calls: list[Any]) -> None:
    from sagemaker.tuner import IntegerParameter

    rule = {"Name": "mine", "Regex": "mine=(.*)"}
    ranges = {"task.max_steps": IntegerParameter(5, 9)}
    tuned(estimator(job("tune")), ranges, "mine", metric_definitions=[rule], base_tuning_job_name="own")
    assert calls[-1][1]["HyperParameterTuningJobName"].startswith("own-")
    assert rule in trial(calls[-1][1])["AlgorithmSpecification"]["MetricDefinitions"]


def test_C8_an_objective_that_no_trial_reports_is_refused() -> None:
    from sagemaker.tuner import ContinuousParameter

    ranges = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}
    refused(lambda: tuned(estimator(job()), ranges, "train:los"), "objective_metric_name", "Did you mean train:loss")
    silent = {"backend": {"metric_definitions": False}}
    refused(lambda: tuned(estimator(job(**silent)), ranges), "backend.metric_definitions=true")


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ({"keep_alive_period_in_seconds": 600}, "backend.keep_alive_period_in_seconds"),
        ({"remote_debug": True}, "backend.remote_debug"),
        (
            {"training_plan_arn": "arn:aws:sagemaker:us-east-1:111122223333:training-plan/abc"},
            "backend.training_plan_arn",
        ),
        (
            {"instance_groups": [{"name": "a", "instance_type": "ml.m5.2xlarge", "instance_count": 1}]},
            "backend.instance_groups",
        ),
    ],
)
def test_C8_what_a_tuner_loses_is_refused_by_name(backend: dict[str, Any], path: str) -> None:
    from sagemaker.tuner import ContinuousParameter

    ranges = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}
    refused(lambda: tuned(estimator(job(backend=backend)), ranges), path, "a tuning job")


def test_C8_ranges_that_no_worker_would_take_are_refused_in_one_line() -> None:
    from sagemaker.tuner import CategoricalParameter, ContinuousParameter, IntegerParameter
    from sagemaker.workflow.parameters import ParameterFloat, ParameterString

    cases: list[tuple[dict[Any, Any], str]] = [
        ({"task.optim.weight_decay": ContinuousParameter(ParameterFloat("Low", 0.1), 0.2)}, "not pipeline variables"),
        ({"task.precision.compute": CategoricalParameter([ParameterString("P", "bf16")])}, "not pipeline variables"),
        ({"environment.X": CategoricalParameter([ParameterString("P", "x")])}, "not pipeline variables"),
        ({ParameterString("N", "task.max_steps"): IntegerParameter(1, 2)}, "name must be text"),
        ({"task.optim.weight_deacy": ContinuousParameter(0.1, 0.2)}, "Did you mean"),
        ({"task.max_steps": CategoricalParameter(["many"])}, "whole number"),
        ({"task.max_steps": ContinuousParameter(5.5, 7.5)}, "whole number"),
        ({"compute.instance_count": IntegerParameter(1, 2)}, "settled"),
    ]
    for ranges, words in cases:
        error = refused(lambda ranges=ranges: tuned(estimator(job()), ranges), words)  # type: ignore[misc]
        assert "\n" not in str(error)


def test_C8_tuners_of_other_estimators_are_left_alone(calls: list[Any]) -> None:
    from sagemaker.estimator import Estimator
    from sagemaker.tuner import ContinuousParameter

    estimator(job())
    plain = Estimator("image", ROLE, 1, "ml.m5.large")
    tuned(plain, {"x": ContinuousParameter(0, 1)}, "any", metric_definitions=[{"Name": "any", "Regex": "(.*)"}])
    assert json.loads(json.dumps(trial(calls[-1][1])["AlgorithmSpecification"]["MetricDefinitions"])) == [
        {"Name": "any", "Regex": "(.*)"}
    ]


def test_C9_variables_of_the_platform_are_refused_whoever_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sagemaker.workflow.parameters import ParameterString

    refused(lambda: estimator(job(), environment={"RANK": ParameterString("R", "1")}), "environment.RANK", "torchrun")
    refused(lambda: estimator(job(), hyperparameters={"environment.MASTER_ADDR": "10.0.0.9"}), "MASTER_ADDR")
    defaults = {"SchemaVersion": "1.0", "SageMaker": {"TrainingJob": {"Environment": {"SM_HPS": "{}"}}}}
    (tmp_path / "config.yaml").write_text(json.dumps(defaults))
    monkeypatch.setenv("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", str(tmp_path / "config.yaml"))
    refused(lambda: estimator(job()), "environment.SM_HPS", "config.yaml")


def test_C7_the_worker_reads_hyperparameters_of_a_job_with_inputs(calls: list[Any]) -> None:
    """There the task names the folder of the channel, not the input."""
    est = estimator(job(task=ROWS, inputs={"corpus": DATA}), hyperparameters={"task.max_steps": 7})
    changed, _ = applied(est.submission.job, {"task.max_steps": "8"})
    assert (changed.spec.task.max_steps, changed.spec.task.data.train) == (8, "/opt/ml/input/data/corpus")
