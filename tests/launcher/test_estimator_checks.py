"""What is given to an estimator beside its arguments, with the real SDK: session, attributes, ``fit``, names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sm_llm.contract.hyperparameters import applied
from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator
from tests.fixtures.sagemaker_calls import BUCKET, ROLE, calls, job
from tests.launcher.test_estimator_arguments import refused

__all__ = ["calls"]
pytestmark = pytest.mark.integration

SCRIPT = {"kind": "script", "entry": "-m x"}
DATA = f"s3://{BUCKET}/train"


def session(region: str, **more: Any) -> Any:
    import boto3
    import sagemaker

    return sagemaker.Session(boto3.session.Session(region_name=region), **more)


def keys() -> list[str]:
    import boto3

    return [it["Key"] for it in boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="runs/").get("Contents", [])]


def test_D13_a_session_of_another_region_is_refused_by_name(calls: list[Any]) -> None:
    import boto3

    other = session("eu-west-1")
    refused(lambda: estimator(job(), sagemaker_session=other), "sagemaker_session: ", "eu-west-1", "us-east-1")
    client = boto3.client("sagemaker", region_name="eu-west-1")
    given = session("us-east-1", sagemaker_client=client)
    refused(lambda: estimator(job(), sagemaker_session=given), "sagemaker_session.sagemaker_client", "eu-west-1")
    bucket = session("us-east-1", default_bucket="sagemaker-eu-west-1-111122223333")
    refused(lambda: estimator(job(), sagemaker_session=bucket), "sagemaker_session.default_bucket", "eu-west-1")
    estimator(job(), sagemaker_session=session("us-east-1")).fit(wait=False)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "name",
    [
        "sm_llm_run", "mp_parameters", "sagemaker_program", "sagemaker_submit_directory", "sagemaker_region",
        "sagemaker_container_log_level", "sagemaker_anything_later", "default_user_module_name",
        "_tuning_objective_metric",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_pipeline", [False, True])
def test_C8_hyperparameters_of_ours_and_of_the_toolkit_are_refused_by_name(
    name: str, is_pipeline: bool, calls: list[Any]
) -> None:
    from sagemaker.workflow.pipeline_context import PipelineSession

    given = {"sagemaker_session": PipelineSession(default_bucket=BUCKET)} if is_pipeline else {}
    value = f"s3://{BUCKET}/elsewhere"
    refused(lambda: estimator(job(), hyperparameters={name: value}, **given), f"hyperparameters.{name}", "follows")
    est = estimator(job(), **given)
    refused(lambda: est.set_hyperparameters(**{name: value}), f"hyperparameters.{name}")


def test_C8_hyperparameters_that_are_no_mapping_are_refused() -> None:
    refused(lambda: estimator(job(), hyperparameters=["task.max_steps"]), "hyperparameters: must be a mapping")


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("environment", {"RANK": "1"}, "sm_llm.estimator(spec, environment=...)"),
        ("output_path", "s3://elsewhere/x", "storage"),
        ("distribution", {}, "task.parallelism"),
        ("container_entry_point", ["sh"], "task.entry"),
        ("input_mode", "Pipe", "inputs.NAME"),
        ("entry_point", "y.py", "task.entry"),
        ("source_dir", "/code", "task.source"),
        ("image_uri", "other", "image_uri=..."),
        ("instance_count", 4, "instance_count=..."),
        ("use_spot_instances", True, "use_spot_instances=..."),
        ("code_uri", "s3://elsewhere/x", "Build another"),
        ("_enable_remote_debug", True, "enable_remote_debug=..."),
        ("_hyperparameters", {"sm_llm_run": "x"}, "set_hyperparameters"),
        ("sagemaker_session", None, "sagemaker_session=..."),
        ("instnace_count", 4, "Did you mean"),
    ],
)
def test_C8_an_attribute_that_is_set_later_is_refused_by_name(
    name: str, value: Any, instead: str, calls: list[Any]
) -> None:
    est = estimator(job())
    setattr(est, name, value)
    refused(lambda: est.fit(wait=False), f"{name.lstrip('_')}: ", instead)
    assert not calls
    assert not keys()


def test_C8_a_change_inside_an_attribute_is_refused_before_and_after_a_job(calls: list[Any]) -> None:
    est = estimator(job(), environment={"A": "1"}, tags=[{"Key": "a", "Value": "1"}])
    est.set_hyperparameters(**{"task.max_steps": 7})
    est.fit(wait=False)
    est.set_hyperparameters(**{"task.max_steps": 8})
    est.fit(wait=False)
    sent = [applied(est.submission.job, {"task.max_steps": it["HyperParameters"]["task.max_steps"]}) for _, it in calls]
    assert [changed.spec.task.max_steps for changed, _ in sent] == [7, 8]
    est.environment["B"] = "2"
    refused(lambda: est.set_hyperparameters(**{"task.max_steps": 9}), "environment: ")
    refused(lambda: est.fit(wait=False), "environment: ")
    del est.environment["B"]
    est.tags.append({"Key": "b", "Value": "2"})
    refused(lambda: est.fit(wait=False), "tags: ")
    assert len(calls) == 2


@pytest.mark.parametrize("when", ["before fit", "after fit"])
def test_C8_a_step_of_a_pipeline_takes_no_change_of_an_attribute(when: str, calls: list[Any]) -> None:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    pipelines = PipelineSession(default_bucket=BUCKET)
    est = estimator(job(), sagemaker_session=pipelines, environment={"A": "1"})
    if when == "before fit":
        est.environment["B"] = "2"
        refused(est.fit, "environment: ")
        return
    step = TrainingStep("train", step_args=est.fit())
    pipeline = Pipeline("p", steps=[step], sagemaker_session=pipelines)
    assert pipeline.definition() == pipeline.definition()
    est.environment["B"] = "2"
    refused(pipeline.definition, "environment: ")


def test_C8_a_tuner_takes_no_change_of_an_attribute(calls: list[Any]) -> None:
    from sagemaker.tuner import ContinuousParameter, HyperparameterTuner

    est = estimator(job("tune"))
    ranges = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}
    tuner = HyperparameterTuner(est, "train:loss", ranges, objective_type="Minimize", max_jobs=2)
    tuner.fit(wait=False)
    tuner.fit(wait=False)
    est.instance_count = 4
    refused(lambda: tuner.fit(wait=False), "instance_count: ")
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("s3://Data_Bkt/x", "names no valid bucket"),
        ("s3://", "names no valid bucket"),
        ("s3://192.168.0.1/x", "names no valid bucket"),
        (f"s3://{BUCKET}/{'x' * 1100}", "at most 1,024"),
        ("/data", "is not a prefix in S3"),
        (5, "is not an input"),
        (None, "is not an input"),
        ([DATA], "is not an input"),
        ({"uri": DATA}, "is not an input"),
    ],
    ids=lambda it: str(it)[:20],
)
def test_C8_inputs_of_fit_are_checked_before_anything_is_written(value: Any, words: str, calls: list[Any]) -> None:
    est = estimator(job(task=SCRIPT))
    refused(lambda: est.fit({"train": value}, wait=False), "inputs.train", words)
    assert not calls
    assert not keys()


def test_C8_settings_of_inputs_of_fit_are_checked_alike(calls: list[Any]) -> None:
    from sagemaker.inputs import FileSystemInput, TrainingInput

    vpc = {"vpc": {"subnets": ["subnet-0a"], "security_group_ids": ["sg-0b"]}}
    est = estimator(job(task=SCRIPT, backend=vpc))
    refused(lambda: est.fit({"train": TrainingInput("s3://Data_Bkt/x")}), "inputs.train", "no valid bucket")
    refused(lambda: est.fit({"train": TrainingInput(5)}), "inputs.train", "cannot be sent")
    refused(lambda: est.fit({"train": TrainingInput(DATA, s3_data_type="S3Prefx")}), "S3DataType", "S3Prefix")
    refused(lambda: est.fit({"train": FileSystemInput("nope", "EFS", "/x")}), "inputs.train", "FileSystemId")
    refused(lambda: est.fit(5), "inputs.training", "is not an input")
    refused(lambda: est.fit(job_name=5), "job_name", "must be text")
    est.fit({"train": TrainingInput(DATA, input_mode="FastFile")}, wait=False)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"instance_placement_config": {"bad": 1}}, ("instance_placement_config", "bad")),
        ({"instance_placement_config": 1}, ("instance_placement_config",)),
        ({"enable_infra_check": "yes"}, ("enable_infra_check",)),
        ({"enable_session_tag_chaining": "yes"}, ("enable_session_tag_chaining",)),
        ({"enable_sagemaker_metrics": "yes"}, ("enable_sagemaker_metrics",)),
        ({"container_log_level": "INFO"}, ("container_log_level", "20 for INFO")),
        ({"metric_definitions": [{"Name": "a", "Regex": "a=("}]}, ("metric_definitions.0.Regex", "a=(")),
        ({"metric_definitions": [{"Name": "a", "Regex": "a=[0-9]+"}]}, ("metric_definitions.0.Regex", "no group")),
        ({"metric_definitions": [{"Name": "a", "Regex": "a=(?:[0-9]+)"}]}, ("no group",)),
        ({"metric_definitions": [{"Name": "a"}]}, ("metric_definitions", "Regex")),
        ({"metric_definitions": [{"Name": "", "Regex": "(.)"}]}, ("metric_definitions", "Name")),
        ({"metric_definitions": {"a": "(.)"}}, ("metric_definitions",)),
        ({"metric_definitions": [{"Name": f"m{it}", "Regex": "(.)"} for it in range(40)]}, ("at most 40",)),
        ({"metric_definitions": [{"Name": "a", "Regex": "(.)"}] * 2}, ("defines 'a' 2 times",)),
    ],
    ids=lambda it: str(it)[:40],
)
def test_C8_passed_arguments_have_the_types_and_limits_of_the_service(
    given: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(lambda: estimator(job(), **given), *words)


def test_C8_a_pipeline_variable_needs_a_pipeline_session(calls: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString
    from sagemaker.workflow.pipeline_context import PipelineSession

    text, number = ParameterString("Text", "x"), ParameterInteger("Number", 5)
    ask = "PipelineSession"
    error = refused(lambda: estimator(job(), environment={"A": text}), "environment.A", ask)
    assert "\n" not in str(error)
    refused(lambda: estimator(job(), hyperparameters={"task.max_steps": number}), "hyperparameters.task.max_steps", ask)
    refused(lambda: estimator(job(), volume_size=number), "volume_size", ask)
    est = estimator(job(task=SCRIPT))
    refused(lambda: est.set_hyperparameters(**{"task.args": text}), "hyperparameters.task.args", ask)
    refused(lambda: est.fit({"train": text}, wait=False), "inputs.train", ask)
    refused(lambda: est.fit({"train": TrainingInput(text)}, wait=False), "inputs.train", ask)
    assert not calls
    assert not keys()
    estimator(job(), environment={"A": text}, sagemaker_session=PipelineSession(default_bucket=BUCKET))


def test_S12_13_variables_are_refused_where_only_some_of_their_values_work(calls: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.pipeline_context import PipelineSession

    task = {
        "kind": "train", "model": {"preset": "tiny"}, "max_steps": 6,
        "data": {"format": "rows", "train": "inputs.corpus", "seq_length": 16},
    }  # fmt: skip
    given = PipelineSession(default_bucket=BUCKET)
    rows = estimator(job(task=task, inputs={"corpus": DATA}), sagemaker_session=given)
    script = estimator(job(task=SCRIPT), sagemaker_session=given)
    sharded = ParameterString("Dist", "ShardedByS3Key")
    kind, location = ParameterString("Ty", "AugmentedManifestFile"), ParameterString("Data", "/tmp/x")
    ask = "not a pipeline variable"
    refused(lambda: rows.fit({"corpus": TrainingInput(DATA, distribution=sharded)}), "S3DataDistributionType", ask)
    for est in (rows, script):
        refused(lambda it=est: it.fit({"corpus": TrainingInput(DATA, s3_data_type=kind)}), "S3DataType", ask)
        refused(lambda it=est: it.fit({"corpus": location}), "inputs.corpus: is not a prefix in S3", "/tmp/x")
        refused(lambda it=est: it.fit({"corpus": TrainingInput(location)}), "inputs.corpus: is not a prefix in S3")
    script.fit({"corpus": TrainingInput(ParameterString("Data", DATA), distribution=sharded)})
    script.fit({"corpus": ParameterString("Data")})
    subnets = [ParameterString("Subnet", "subnet-0a")]
    network = {"subnets": subnets, "security_group_ids": ["sg-0b"]}
    refused(lambda: estimator(job(), sagemaker_session=given, **network), "subnets: holds a pipeline variable")


def test_S12_12_inputs_of_fit_are_inputs_of_the_job_and_of_its_record(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    import boto3

    task = {
        "kind": "train", "model": {"preset": "tiny"}, "max_steps": 6,
        "data": {"format": "rows", "train": "inputs.corpus", "seq_length": 16},
    }  # fmt: skip
    est, other = estimator(job(task=task, inputs={"corpus": DATA})), f"s3://{BUCKET}/other"
    for given in ({"corpus": other}, None, {"corpus": other}):
        est.fit(given, wait=False)
        location = DATA if given is None else other
        assert re.search(rf"data +{location} \(rows of 16 tokens\)", capsys.readouterr().err)
        key = est.run_uri.removeprefix(f"s3://{BUCKET}/")
        record = json.loads(boto3.client("s3").get_object(Bucket=BUCKET, Key=f"{key}/run.json")["Body"].read())
        corpus = record["spec"]["inputs"]["corpus"]
        assert corpus == location or (corpus["uri"], corpus["mode"]) == (location, "File")
        assert est.submission.job.channels == {"corpus": location}
        assert {it["Key"]: it["Value"] for it in calls[-1][1]["Tags"]}["sm_llm:run"] == est.run_uri


def test_a_role_that_a_pipeline_knows_is_a_role(calls: list[Any]) -> None:
    from sagemaker.workflow.functions import Join
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    spec = job()
    del spec["backend"]["role"]
    session = PipelineSession(default_bucket=BUCKET)
    account = ParameterString("Account")
    for role in (ParameterString("Role"), Join("", ["arn:aws:iam::", account, ":role/x"])):
        est = estimator(spec, role=role, sagemaker_session=session)
        est.set_hyperparameters(**{"task.max_steps": 4})
        step = TrainingStep("train", step_args=est.fit())
        definition = json.loads(Pipeline("p", [account], steps=[step], sagemaker_session=session).definition())
        assert definition["Steps"][0]["Arguments"]["RoleArn"] == role.expr
        assert est.plan.target.facts["role"] == "a variable of the pipeline"
    bad = ParameterString("Role", "me")
    refused(lambda: estimator(spec, role=bad, sagemaker_session=session), "backend.role", "'me'")
    refused(lambda: estimator(spec, role=ParameterString("Role")), "role: is a pipeline variable", "PipelineSession")
    refused(lambda: estimator(spec, sagemaker_session=session), "backend.role: no IAM role is given")


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_a_role_of_another_account_is_warned_of_before_anything_is_stored(
    is_pipeline: bool, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    import sagemaker
    from sagemaker.workflow.parameters import ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession
    from sagemaker.workflow.steps import TrainingStep

    session = (PipelineSession if is_pipeline else sagemaker.Session)(default_bucket=BUCKET)

    def warned(**given: Any) -> int:
        est = estimator(job(), sagemaker_session=session, **given)
        assert "account" not in capsys.readouterr().err  # building an estimator contacts nothing
        step = est.fit(**({} if is_pipeline else {"wait": False}))
        if is_pipeline:
            pipeline = Pipeline("p", steps=[TrainingStep("a", step_args=step)], sagemaker_session=session)
            assert pipeline.definition() == pipeline.definition()
        text = " ".join(capsys.readouterr().err.split())
        return text.count("is of account 111122223333, and the credentials here are of 123456789012")

    assert warned() == 1
    assert warned(role="arn:aws:iam::123456789012:role/x") == 0
    if is_pipeline:
        assert warned(role=ParameterString("Role")) == 0


def test_lists_with_pipeline_variables_are_checked_by_their_entries(calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterFloat, ParameterString
    from sagemaker.workflow.pipeline_context import PipelineSession

    def built(**given: Any) -> Any:
        return estimator(job(), sagemaker_session=PipelineSession(default_bucket=BUCKET), **given)

    unknown, betas = ParameterString("Unknown"), "task.optim.betas"
    refused(
        lambda: built(hyperparameters={betas: [0.9, ParameterFloat("B", 0.99)]}), betas, "one text", "'[0.9, 0.95]'"
    )
    inside = {"task.optim": {"learning_rate": ParameterFloat("B", 0.99)}}
    refused(lambda: built(hyperparameters=inside), "task.optim", "such as task.optim.learning_rate")
    built(hyperparameters={betas: ParameterString("Betas", "[0.9, 0.95]")})
    refused(lambda: built(hyperparameters={betas: ParameterString("Betas", "[0.9, 1.5]")}), betas, "less than 1")
    refused(lambda: built(subnets=[unknown, "a b"], security_group_ids=[unknown]), "backend.vpc.subnets", "a b")
    refused(lambda: built(tags=[{"Key": "a", "Value": unknown}, {"Key": "b", "Value": "x" * 300}]), "backend.tags.b")
    refused(lambda: built(environment={"A": unknown, "a b": "x"}), "environment.a b")
    built(subnets=[unknown, "subnet-0a"], security_group_ids=[unknown], environment={"A": unknown})


def test_every_choice_of_a_variable_is_checked_as_the_value_would_be(calls: list[Any]) -> None:
    from sagemaker.workflow.execution_variables import ExecutionVariables
    from sagemaker.workflow.functions import Join
    from sagemaker.workflow.parameters import ParameterBoolean, ParameterInteger, ParameterString
    from sagemaker.workflow.pipeline_context import PipelineSession

    def built(given: dict[str, Any], **more: Any) -> Any:
        session = PipelineSession(default_bucket=BUCKET)
        return estimator(job(), sagemaker_session=session, hyperparameters=given, **more)

    precision, steps = "task.precision.compute", "task.max_steps"
    refused(lambda: built({precision: ParameterString("Q", "fp32", enum_values=["fp32", "banana"])}), "banana")
    refused(lambda: built({precision: ParameterString("Q", enum_values=["banana"])}), precision, "banana")
    refused(lambda: built({steps: ParameterInteger("Q", default_value=0)}), steps, "at least 1")
    for text in (ExecutionVariables.PIPELINE_EXECUTION_ID, ExecutionVariables.START_DATETIME):
        refused(lambda it=text: built({"task.seed": it}), "hyperparameters.task.seed", "Execution.")
    refused(lambda: built({"task.seed": ParameterBoolean("Q")}), "task.seed", "Parameters.Q")
    refused(lambda: built({precision: Join(on="", values=["fp", ParameterString("Q", "17")])}), precision, "fp17")
    built({precision: Join(on="", values=["fp", ParameterString("Q", "32", enum_values=["32"])])})
    built({steps: ParameterInteger("Q"), "environment.RUN": ExecutionVariables.PIPELINE_EXECUTION_ID})
    built({"task.seed": ParameterInteger("Q", default_value=0), precision: ParameterString("P")})

    refused(lambda: built({}, role=ParameterString("R", "banana")), "backend.role", "banana")
    refused(lambda: built({}, role=ParameterString("R", ROLE, enum_values=[ROLE, "banana"])), "backend.role", "banana")
    refused(lambda: built({}, volume_size=ParameterInteger("V", default_value=-5)), "backend.volume_size_gb")
    tag = {"Key": "a", "Value": ParameterString("T", "b!")}
    refused(lambda: built({}, tags=[tag]), "backend.tags.a")
    refused(lambda: built({}, environment={"A": ParameterString("E", "x" * 600)}), "environment.A")
    network = {"subnets": [ParameterString("S", "banana")], "security_group_ids": [ParameterString("G", "sg-0b")]}
    refused(lambda: built({}, **network), "backend.vpc.subnets", "banana")
    network["subnets"] = [ParameterString("S")]
    built({}, **network, role=ParameterString("R", ROLE), enable_infra_check=ParameterBoolean("I", default_value=True))
    refused(lambda: built({}, enable_infra_check=ParameterString("I", "yes")), "enable_infra_check", "yes")

    est = built({})
    choices = ParameterString("D", DATA, enum_values=[DATA, "/tmp/x"])
    script = estimator(job(task=SCRIPT), sagemaker_session=est.sagemaker_session)
    refused(lambda: script.fit({"train": choices}), "inputs.train", "/tmp/x")
    text = ParameterString("Q", "a", enum_values=["a", "b?c"])
    refused(lambda: est.set_hyperparameters(**{"environment.A": text}) or est.fit(), "variable Q", "b?c")


def test_what_an_estimator_has_after_fit_alone_is_refused_in_words_before(calls: list[Any]) -> None:
    est = estimator(job())
    refused(lambda: est.model_data, "estimator.model_data", "none was started", "estimator.result_uri")
    refused(est.logs, "estimator.logs()", "none was started", "fit()")


def test_an_argument_given_twice_shows_its_value(calls: list[Any]) -> None:
    refused(lambda: estimator(job(), "compute.instance_count=1", instance_count=3), "given twice", "got 3")
