"""Values for the variables of pipelines, with the real SDK: a start checks them as the definition would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.sagemaker.sdk import sdk_pipelines
from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator
from sm_llm.launcher.backends.sagemaker.sdk.sdk_effects import EFFECTS
from tests.fixtures.sagemaker_calls import BUCKET, ROLE, TRAIN, calls, job
from tests.launcher.test_estimator_arguments import refused

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["calls"]
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:We are deprecating:DeprecationWarning")]

MODEL = "task.model.config"
OTHER = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
PLAN = "arn:aws:sagemaker:eu-west-1:111122223333:training-plan/x"
# Argument -> value at the definition, value that a start refuses; a list and mappings hold the variable in an entry.
ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "role": (ROLE, "banana"),
    "volume_size": (30, 0),
    "max_wait": (7200, 60),
    "keep_alive_period_in_seconds": (600, 999_999),
    "max_retry_attempts": (2, 99),
    "environment": ("a", "x" * 600),
    "tags": ("a", "b!"),
    "subnets": ("subnet-0a", "a b"),
    "security_group_ids": ("sg-0a", "a b"),
    "output_kms_key": (OTHER.replace("eu-west", "us-east"), OTHER),
    "volume_kms_key": (OTHER.replace("eu-west", "us-east"), OTHER),
    "training_plan": (PLAN.replace("eu-west", "us-east"), PLAN),
    "encrypt_inter_container_traffic": (True, None),
    "enable_remote_debug": (True, None),
}
SPOT = {"max_wait": {"backend": {"spot": True}}}


def session() -> Any:
    from sagemaker.workflow.pipeline_context import PipelineSession

    return PipelineSession(default_bucket=BUCKET)


def training(est: Any, name: str = "train", inputs: Any = None) -> Any:
    from sagemaker.workflow.steps import TrainingStep

    return TrainingStep(name, step_args=est.fit(inputs))


def tuning(est: Any, ranges: dict[str, Any] | None = None, **more: Any) -> Any:
    from sagemaker.parameter import ContinuousParameter
    from sagemaker.tuner import HyperparameterTuner
    from sagemaker.workflow.steps import TuningStep

    rate = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}
    given = {"max_jobs": 2, "objective_type": "Minimize", **more}
    return TuningStep("train", step_args=HyperparameterTuner(est, "train:loss", ranges or rate, **given).fit())


def in_a_branch(est: Any) -> Any:
    from sagemaker.workflow.condition_step import ConditionStep
    from sagemaker.workflow.conditions import ConditionEquals

    inner = ConditionStep("inner", conditions=[ConditionEquals(1, 1)], if_steps=[], else_steps=[training(est)])
    return ConditionStep("outer", conditions=[ConditionEquals(1, 1)], if_steps=[inner], else_steps=[])


def pipeline(step: Any, *variables: Any) -> Any:
    from sagemaker.workflow.pipeline import Pipeline

    return Pipeline("p", parameters=list(variables), steps=[step], sagemaker_session=step_session(step))


def step_session(step: Any) -> Any:
    while getattr(step, "step_args", None) is None:
        step = (step.if_steps + step.else_steps)[0]
    return step.step_args.func_args[0].sagemaker_session


def begun(flow: Any, calls: list[Any], **values: Any) -> bool:
    flow.start(values)
    return "StartPipelineExecution" in [operation for operation, _ in calls]


@pytest.mark.parametrize("made", [training, tuning, in_a_branch])
def test_S4_S6_hyperparameters_are_checked_by_the_plan_wherever_a_step_holds_them(
    made: Callable[[Any], Any], calls: list[Any]
) -> None:
    from sagemaker.workflow.parameters import ParameterFloat, ParameterInteger

    steps, width, heads = ParameterInteger("N", 5), ParameterInteger("W", 64), ParameterInteger("H", 2)
    drop, length = ParameterFloat("D", 0.0), ParameterInteger("L", 16)
    given = {
        "task.max_steps": steps, f"{MODEL}.hidden_size": width, f"{MODEL}.num_attention_heads": heads,
        f"{MODEL}.attention_dropout": drop, "task.data.seq_length": length,
    }  # fmt: skip
    flow = pipeline(
        made(estimator(job(), sagemaker_session=session(), hyperparameters=given)), steps, width, heads, drop, length
    )
    for name, value, words in (
        ("N", -1, "task.max_steps: must be at least 1"),
        ("W", 33, "multiple of num_attention_heads"),
        ("H", 3, "multiple of num_"),
        ("D", 1.5, "must be less than 1"),
        ("L", 10**6, "max_position_embeddings"),
    ):
        refused(lambda name=name, value=value: flow.start({name: value}), f"values.{name}: ", words)
    # One alone does not fit, and both together do.
    refused(lambda: flow.start({"W": 66, "H": 4}), "values")
    assert begun(flow, calls, W=32, H=4)


def test_S6_settings_of_a_tuning_job_and_values_beside_its_ranges_are_checked(calls: list[Any]) -> None:
    from sagemaker.parameter import CategoricalParameter, IntegerParameter
    from sagemaker.workflow.parameters import ParameterInteger

    most, together, heads = ParameterInteger("Most", 2), ParameterInteger("Together", 1), ParameterInteger("H", 2)
    given = {f"{MODEL}.num_attention_heads": heads}
    est = estimator(job(), sagemaker_session=session(), hyperparameters=given)
    widths = {f"{MODEL}.hidden_size": IntegerParameter(64, 66)}
    step = tuning(est, {"task.seed": IntegerParameter(1, 9)}, max_jobs=most, max_parallel_jobs=together)
    flow = pipeline(step, most, together, heads)
    refused(lambda: flow.start({"Most": 0}), "values.Most", "at least 1")
    refused(lambda: flow.start({"Together": 3}), "values.Together", "at most max_jobs, which is 2")
    assert begun(flow, calls, Most=3, Together=3)

    est = estimator(job(), sagemaker_session=session(), hyperparameters={f"{MODEL}.num_attention_heads": heads})
    widths = {f"{MODEL}.hidden_size": CategoricalParameter([64, 96])}
    flow = pipeline(tuning(est, widths, strategy="Grid", max_jobs=most), most, heads)
    refused(lambda: flow.start({"Most": 3}), "values.Most", "number of combinations of a Grid, 2")
    refused(lambda: flow.start({"H": 64}), "values.H")


@pytest.mark.parametrize("name", [name for name, it in EFFECTS.items() if it.kind == "field" and it.variable])
def test_values_of_every_argument_that_a_variable_may_stand_for_are_checked(name: str, calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterBoolean, ParameterInteger, ParameterString

    usual, wrong = ARGUMENTS[name]
    kind = {bool: ParameterBoolean, int: ParameterInteger, str: ParameterString}[type(usual)]
    variable = kind("V", default_value=usual)
    value: Any = variable
    if name in ("subnets", "security_group_ids"):
        value = [variable]
    elif name in ("environment", "tags"):
        value = {"A": variable} if name == "environment" else [{"Key": "a", "Value": variable}]
    others: dict[str, Any] = {
        "subnets": {"security_group_ids": [ParameterString("O", "sg-0b")]},
        "security_group_ids": {"subnets": [ParameterString("O", "subnet-0b")]},
    }.get(name, {})
    spec = job(**SPOT.get(name, {}))
    flow = pipeline(training(estimator(spec, sagemaker_session=session(), **{name: value}, **others)), variable)
    if wrong is None:
        refused(lambda: flow.start({"V": "perhaps"}), "values.V", "true or false")
    else:
        refused(lambda: flow.start({"V": wrong}), "values.V")
    assert begun(flow, calls, V=usual)


def test_a_type_of_another_kind_than_its_place_takes_is_refused_at_the_start(calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterString

    check = ParameterString("I")
    flow = pipeline(training(estimator(job(), sagemaker_session=session(), enable_infra_check=check)), check)
    refused(lambda: flow.start({"I": "yes"}), "values.I", "true or false")


def test_S2_a_variable_of_which_no_value_works_is_refused_when_it_is_given(calls: list[Any]) -> None:
    from sagemaker.workflow.parameters import ParameterBoolean, ParameterInteger

    def built(spec: Any = None, **given: Any) -> Any:
        return estimator(spec or job(), sagemaker_session=session(), **given)

    wait = ParameterInteger("W")
    refused(lambda: built(max_wait=wait), "backend.max_wait_seconds", "spot", "Parameters.W")
    built(job(**SPOT["max_wait"]), max_wait=wait)
    refused(lambda: built(volume_size=ParameterBoolean("B")), "backend.volume_size_gb", "Parameters.B")
    built(volume_size=ParameterInteger("V"), keep_alive_period_in_seconds=ParameterInteger("K"))


def test_S5_any_part_of_a_step_that_holds_the_address_of_another_waits_for_it(calls: list[Any]) -> None:
    from sagemaker.processing import ProcessingInput, Processor
    from sagemaker.workflow.condition_step import ConditionStep
    from sagemaker.workflow.conditions import ConditionEquals
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import ProcessingStep, TrainingStep

    own = session()
    first = estimator(job("first"), sagemaker_session=own)
    one = training(first, "one")
    result = first.result_uri

    def flow(*steps: Any) -> str:
        text: str = Pipeline("p", steps=[one, *steps], sagemaker_session=own).definition()
        return text

    def processed(name: str = "two", words: Any = (), **order: Any) -> Any:
        processor = Processor(ROLE, "111122223333.dkr.ecr.us-east-1.amazonaws.com/x:1", 1, "ml.m5.large",
                              sagemaker_session=own)  # fmt: skip
        read = [] if words else [ProcessingInput(source=result, destination="/opt/ml/processing/in", input_name="m")]
        return ProcessingStep(name, step_args=processor.run(inputs=read, arguments=list(words) or None), **order)

    refused(lambda: flow(processed()), "steps.two.m: reads what one publishes", "ProcessingStep")
    refused(lambda: flow(processed(words=[f"--model={result}/x"])), "steps.two", "depends_on=['one']")
    assert flow(processed(depends_on=["one"]))

    # Another step's own output may lie below the run, and is none of its results.
    from sagemaker.inputs import TrainingInput
    from sagemaker.processing import ProcessingOutput

    evaluated = Processor(ROLE, "111122223333.dkr.ecr.us-east-1.amazonaws.com/x:1", 1, "ml.m5.large",
                          sagemaker_session=own)  # fmt: skip
    where = f"{first.run_uri}/eval"
    output = ProcessingOutput(source="/opt/ml/processing/out", destination=where, output_name="o")
    wrote = ProcessingStep("wrote", step_args=evaluated.run(outputs=[output]), depends_on=["one"])
    reading = estimator(job("reading", {"kind": "script", "entry": "-m json"}), sagemaker_session=own)
    assert flow(wrote, TrainingStep("last", step_args=reading.fit({"m": TrainingInput(where)}), depends_on=["wrote"]))

    # No channel brings a checkpoint: its address is in the job file alone.
    def continuing(name: str, run: Any) -> Any:
        return estimator(job(name, {**TRAIN, "start": {"checkpoint": run}}), sagemaker_session=own)

    tuner = tuning(continuing("second", first.run_uri))
    refused(lambda: flow(tuner), "steps.train.task.start.checkpoint", "TuningStep")
    tuner.add_depends_on(["one"])
    assert flow(tuner)

    def branch(*inside: Any, **order: Any) -> Any:
        equal = [ConditionEquals(1, 1)]
        return ConditionStep("if", conditions=equal, if_steps=list(inside), else_steps=[], **order)

    refused(lambda: flow(branch(processed("in"))), "steps.in.m", "depends_on=['one']")
    assert flow(branch(processed("in"), depends_on=["one"]))
    third = estimator(job("third"), sagemaker_session=own)
    inner, step_args = training(third, "inner"), continuing("fourth", third.run_uri).fit()
    refused(lambda: flow(branch(inner, TrainingStep("beside", step_args=step_args))), "steps.beside", "['inner']")
    refused(lambda: flow(branch(inner), TrainingStep("after", step_args=step_args)), "steps.after", "['inner']")
    assert flow(branch(inner), TrainingStep("after", step_args=step_args, depends_on=["if"]))


def test_S5_an_address_among_the_arguments_of_a_program_is_waited_for(calls: list[Any]) -> None:
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import TrainingStep

    own = session()
    first = estimator(job("first"), sagemaker_session=own)
    one = training(first, "one")
    result = first.result_uri
    for args, path in (({"model": result}, "model"), (["-m", f"--m={result}/x"], "1"), ({"job": result}, "job")):
        script = {"kind": "script", "entry": "-m json", "args": args}
        step_args = estimator(job("second", script), sagemaker_session=own).fit()

        def flow(step_args: Any = step_args, **order: Any) -> str:
            steps = [one, TrainingStep("two", step_args=step_args, **order)]
            text: str = Pipeline("p", steps=steps, sagemaker_session=own).definition()
            return text

        refused(flow, f"steps.two.task.args.{path}: reads what one publishes", "depends_on=['one']")
        assert flow(depends_on=["one"])


def test_A1_the_address_of_a_run_that_no_step_writes_is_refused(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    import boto3
    from sagemaker.workflow.functions import Join
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import TrainingStep

    own, count, given_at = session(), ParameterInteger("N", 5), ParameterString("P", f"s3://{BUCKET}/train")
    script = {"kind": "script", "entry": "-m json"}

    def flow(one: Any, location: Any, read: str = "channel") -> str:
        task = {**TRAIN, "start": {"checkpoint": location}} if read == "start" else script
        given = {"environment": {"OutputDataConfig": location}} if read == "environment" else {}
        second = estimator(job("second", task), sagemaker_session=own, **given)
        two = TrainingStep(
            "two", step_args=second.fit({"m": location} if read == "channel" else None), depends_on=[one]
        )
        text: str = Pipeline("p", parameters=[count, given_at], steps=[one, two], sagemaker_session=own).definition()
        return text

    words = "is a run that no step of this pipeline writes", "that of one lies at s3://", "after fit()"
    for inputs, given in (
        ({"m": f"s3://{BUCKET}/other"}, {}),
        ({"m": given_at}, {}),
        ({"m": given_at}, {"hyperparameters": {"task.args.n": count}}),
    ):
        first = estimator(job("first", {**script, "args": {"n": 1}}), sagemaker_session=own, **given)
        before, one = first.result_uri, training(first, "one", inputs)
        refused(lambda one=one, it=before: flow(one, it), "steps.two.m: ", *words)
    refused(lambda: flow(one, Join("/", [before, "x"])), "steps.two.m: ", *words)
    refused(lambda: flow(one, before, "environment"), "steps.two.Environment.OutputDataConfig: ", *words)
    first = estimator(job("first", {**script, "args": {"n": 1}}), sagemaker_session=own)
    run_before, one = first.run_uri, training(first, "one", {"m": given_at})
    refused(lambda: flow(one, run_before, "start"), "steps.two.task.start.checkpoint: ", *words)
    assert flow(one, one.properties.ModelArtifacts.S3ModelArtifacts)
    missing = estimator(job("missing", script), sagemaker_session=own)
    refused(lambda: flow(one, missing.result_uri), "no step of this pipeline writes", "Add its step")
    capsys.readouterr()
    sdk_pipelines._warn_once.cache_clear()
    # What an earlier execution has published is there to be read, and is named where it is that of a step of this name.
    first = estimator(job("first", script), sagemaker_session=own)
    for it in (missing, first):
        key = f"{it.run_uri.removeprefix(f's3://{BUCKET}/')}/ckpt/commits/final.json"
        boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"{}")
    assert flow(one, missing.result_uri)
    assert "an earlier run is read there" not in capsys.readouterr().err
    assert flow(one, first.result_uri)
    assert f"no step of this pipeline writes {first.result_uri}" in capsys.readouterr().err


@pytest.mark.parametrize("reader", ["ours", "plain", "processing", "model", "package"])
def test_S5_only_steps_of_ours_follow_the_pointer_of_a_result_and_others_are_named(
    reader: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from sagemaker.model import Model
    from sagemaker.processing import ProcessingInput, Processor
    from sagemaker.pytorch import PyTorch
    from sagemaker.workflow.functions import Join
    from sagemaker.workflow.model_step import ModelStep
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import ProcessingStep, TrainingStep

    own, image = session(), "111122223333.dkr.ecr.us-east-1.amazonaws.com/x:1"
    first = estimator(job("first"), sagemaker_session=own)
    one = training(first, "one")
    files = one.properties.ModelArtifacts.S3ModelArtifacts

    def step(location: Any) -> Any:
        if reader == "ours":
            script = job("second", {"kind": "script", "entry": "-m json"})
            step_args = estimator(script, sagemaker_session=own).fit({"m": location})
        elif reader == "plain":
            step_args = PyTorch(
                entry_point="x.py", image_uri=image, role=ROLE, instance_count=1, instance_type="ml.m5.large",
                source_dir=f"s3://{BUCKET}/code/x.tar.gz", sagemaker_session=own,
            ).fit({"m": location})  # fmt: skip
        elif reader == "processing":
            read = ProcessingInput(source=location, destination="/opt/ml/processing/in", input_name="m")
            run = Processor(ROLE, image, 1, "ml.m5.large", sagemaker_session=own).run(inputs=[read])
            return ProcessingStep("two", step_args=run, depends_on=["one"])
        else:
            model = Model(image_uri=image, model_data=location, role=ROLE, sagemaker_session=own)
            if reader == "model":
                return ModelStep("two", step_args=model.create(instance_type="ml.m5.large"), depends_on=["one"])
            package = model.register(["a"], ["a"], model_package_group_name="g")
            return ModelStep("two", step_args=package, depends_on=["one"])
        return TrainingStep("two", step_args=step_args, depends_on=["one"])

    def flow(location: Any) -> str:
        text: str = Pipeline("p", steps=[one, step(location)], sagemaker_session=own).definition()
        return text

    of_the_result = [files, Join(on="/", values=[files, "train"]), first.result_uri, f"{first.result_uri}/train"]
    for location in of_the_result:
        capsys.readouterr()
        if reader in ("model", "package"):
            refused(lambda it=location: flow(it), "is no model: one publishes files", "a step of the kind register")
        else:
            sdk_pipelines._warn_once.cache_clear()
            assert flow(location)
            warning = "steps.two.m: brings only published.json, which names the files that one publishes"
            assert (warning in capsys.readouterr().err) is (reader != "ours")
    elsewhere = [
        first.run_uri, f"{first.run_uri}/train", f"{first.run_uri}/final", one.properties.OutputDataConfig.S3OutputPath,
        one.properties.CheckpointConfig.S3Uri,
    ]  # fmt: skip
    for location in elsewhere:
        refused(lambda it=location: flow(it), "is not where one publishes its result", "S3ModelArtifacts")


def test_S4_a_property_of_a_step_that_a_setting_cannot_be_is_refused(calls: list[Any]) -> None:
    own = session()
    one = training(estimator(job("first"), sagemaker_session=own), "one").properties

    def second(**given: Any) -> Any:
        values = {name.replace("__", "."): value for name, value in given.items()}
        return estimator(job("second"), sagemaker_session=own, hyperparameters=values)

    rate = one.FinalMetricDataList["train:loss"].Value
    for value in (one.TrainingJobName, rate):
        refused(lambda it=value: second(task__max_steps=it), "task.max_steps", "a whole number")
    refused(lambda: second(task__optim__learning_rate=one.TrainingJobName), "task.optim.learning_rate", "a number")
    assert second(task__optim__learning_rate=rate)


@pytest.mark.parametrize("validates", [True, False])
def test_S5_a_condition_on_a_metric_that_its_step_never_reports_is_refused(validates: bool, calls: list[Any]) -> None:
    from sagemaker.workflow.condition_step import ConditionStep
    from sagemaker.workflow.conditions import ConditionLessThan
    from sagemaker.workflow.pipeline import Pipeline

    own, data = session(), {**TRAIN["data"], **({"validation_rows": 8} if validates else {})}
    one = training(estimator(job("first", {**TRAIN, "data": data}), sagemaker_session=own), "one")

    def flow(metric: str) -> str:
        found = one.properties.FinalMetricDataList[metric].Value
        less = ConditionStep("if", conditions=[ConditionLessThan(found, 3.0)], if_steps=[], else_steps=[])
        text: str = Pipeline("p", steps=[one, less], sagemaker_session=own).definition()
        return text

    assert flow("train:loss")
    refused(lambda: flow("train:los"), "steps.if: one has no metric definition of this name", "train:loss")
    if validates:
        assert flow("validation:loss")
    else:
        refused(lambda: flow("validation:loss"), "one has no validation rows", "task.data.validation")


def test_an_archive_of_a_trial_which_no_run_publishes_is_refused(calls: list[Any]) -> None:
    from sagemaker.workflow.functions import Join
    from sagemaker.workflow.pipeline import Pipeline

    own = session()
    tuned = estimator(job("tuned"), sagemaker_session=own)
    step = tuning(tuned)

    def definition(location: Any) -> str:
        script = job("script", {"kind": "script", "entry": "-m json"})
        following = training(estimator(script, sagemaker_session=own), "following", {"model": location})
        text: str = Pipeline("p", steps=[step, following], sagemaker_session=own).definition()
        return text

    refused(lambda: definition(step.get_top_model_s3_uri(0, BUCKET, "runs")), "steps.following.model", "'trials'")
    best = step.properties.BestTrainingJob.TrainingJobName
    assert definition(Join(on="/", values=[tuned.run_uri, "trials", best, "result"]))
    refused(lambda: definition(tuned.result_uri), "steps.following.model", "'trials'")


def test_trials_publish_below_the_run_uri_of_their_estimator_with_variables_too(calls: list[Any]) -> None:
    """They lay below the address without variables, and what the next step read was never written."""
    import json

    from sagemaker.tuner import ContinuousParameter, HyperparameterTuner
    from sagemaker.workflow.parameters import ParameterInteger, ParameterString
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.steps import TuningStep

    own, steps, data = session(), ParameterInteger("N", 5), ParameterString("Data", "s3://bucket/data")
    script = job("tuned", {"kind": "script", "entry": "-m json", "args": {"n": 5, "rate": 1e-4}})
    rows = estimator(script, sagemaker_session=own, hyperparameters={"task.args.n": steps})
    twice = estimator(job("many"), sagemaker_session=own, hyperparameters={"task.max_steps": steps})
    plain = estimator(job("plain"), sagemaker_session=own)
    rate = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}
    options: dict[str, Any] = {"max_jobs": 2, "objective_type": "Minimize"}
    metric = [{"Name": "mine:loss", "Regex": "loss ([0-9.]+)"}]
    ranges = {"task.args.rate": ContinuousParameter(1e-5, 1e-3)}
    first = HyperparameterTuner(rows, "mine:loss", ranges, metric_definitions=metric, **options).fit({"d": data})
    several = HyperparameterTuner.create(
        {"a": twice, "b": plain}, {"a": "train:loss", "b": "train:loss"}, {"a": rate, "b": rate}, **options
    ).fit(include_cls_metadata={})
    made = [TuningStep("one", step_args=first), TuningStep("two", step_args=several)]
    text = Pipeline("p", parameters=[steps, data], steps=made, sagemaker_session=own).definition()
    one, two = (it["Arguments"] for it in json.loads(text)["Steps"])
    by_name = {it["DefinitionName"]: it for it in two["TrainingJobDefinitions"]}
    for definition, est in ((one["TrainingJobDefinition"], rows), (by_name["a"], twice)):
        address = est.run_uri.expr
        assert {"Get": "Parameters.N"} in address["Std:Join"]["Values"]
        assert definition["StaticHyperParameters"]["sm_llm_run"] == address
    assert {"Get": "Parameters.Data"} in rows.run_uri.expr["Std:Join"]["Values"]
    assert rows.run_uri.expr in [it["Value"] for it in one["Tags"]]
    assert "sm_llm_run" not in by_name["b"]["StaticHyperParameters"]
    assert plain.run_uri == plain.submission.job.run_uri


def _started(est: Any) -> None:
    est.fit(wait=False)


@pytest.mark.parametrize("use", [_started, training, tuning])
def test_what_a_job_trains_on_and_what_has_no_effect_is_shown_by_every_way_to_start_it(
    use: Callable[[Any], Any], calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from sagemaker import Session

    own = Session(default_bucket=BUCKET) if use is _started else session()
    use(estimator(job(), sagemaker_session=own, hyperparameters={"task.validation.max_rows": 3}))
    text = " ".join(capsys.readouterr().err.split())
    assert "RANDOM TOKENS" in text
    assert "task.validation.max_rows: has no effect" in text
