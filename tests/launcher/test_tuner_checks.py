"""Tuning jobs with the real SDK: ranges, objectives and metric rules that no trial could use are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sagemaker.parameter import CategoricalParameter, ContinuousParameter, IntegerParameter

from sm_llm.launcher.backends.sagemaker.sdk.estimators import estimator
from tests.fixtures.sagemaker_calls import BUCKET, TRAIN, calls, job
from tests.launcher.test_estimator_arguments import refused

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["calls"]
pytestmark = pytest.mark.integration

RATE = {"task.optim.learning_rate": ContinuousParameter(1e-5, 1e-3)}


def tuned(
    ranges: dict[Any, Any], objective: str = "train:loss", kind: str = "Minimize", est: Any = None, **more: Any
) -> Any:
    from sagemaker.tuner import HyperparameterTuner

    return HyperparameterTuner(est or estimator(job()), objective, ranges, objective_type=kind, max_jobs=2, **more)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("task.max_steps", ContinuousParameter(5, 9), "whole number"),
        ("task.data.rows", ContinuousParameter(100, 200), "whole number"),
        ("task.micro_batch_size", ContinuousParameter(1.0, 4.0), "whole number"),
        ("task.max_steps", IntegerParameter(9, 5), "Write IntegerParameter(5, 9)"),
        ("task.optim.learning_rate", ContinuousParameter(1e-3, 1e-5), "must begin below its end"),
        ("task.max_steps", IntegerParameter(5, 5), "one value only"),
        ("task.max_steps", IntegerParameter(5.5, 9), "whole number"),
        ("task.optim.learning_rate", ContinuousParameter(1e-5, float("nan")), "must be a number"),
        ("task.optim.learning_rate", ContinuousParameter("1e-5", 1e-3), "must be a number"),
        ("task.optim.weight_decay", ContinuousParameter(0, 0.1, "Logarithmic"), "above 0"),
        ("task.optim.weight_decay", ContinuousParameter(0, 1.5, "ReverseLogarithmic"), "to below 1"),
        ("task.max_steps", IntegerParameter(1, 5, "ReverseLogarithmic"), "to below 1"),
        ("task.optim.weight_decay", ContinuousParameter(0, 0.1, "Log"), "Logarithmic"),
        ("task.precision.compute", CategoricalParameter(["bf16", "fp17"]), "fp17"),
        ("task.precision.compute", CategoricalParameter(["fp32", "fp32"]), "twice"),
        ("task.precision.compute", CategoricalParameter([]), "at least 1"),
        ("task.optim.schedule", CategoricalParameter(["cosine", "cosin"]), "cosine"),
        ("task.global_batch_size", CategoricalParameter([4, 0]), "at least 1"),
        ("task.optim.warmup_fraction", ContinuousParameter(0.1, 1.0), "less than 1"),
        ("task.max_steps", [5, 9], "is not a range"),
        ("environment.RANK", CategoricalParameter(["0", "1"]), "torchrun sets it"),
    ],
    ids=lambda it: it if isinstance(it, str) else type(it).__name__,
)
def test_C8_a_range_that_the_service_or_a_worker_would_refuse(
    name: str, value: Any, words: str, calls: list[Any]
) -> None:
    error = refused(lambda: tuned({name: value}).fit(wait=False), f"hyperparameter_ranges.{name}: ", words)
    assert "\n" not in str(error)
    assert not calls


def test_C8_values_are_tried_together_with_the_other_ranges_and_what_is_set(calls: list[Any]) -> None:
    floor = {"task.optim.min_learning_rate": ContinuousParameter(1e-5, 5e-4)}
    high = {"task.optim.learning_rate": ContinuousParameter(1e-3, 1e-2)}
    tuned(floor | high).fit(wait=False)  # above the 3e-4 of the specification, never above the rate of a trial
    low = {"task.optim.learning_rate": ContinuousParameter(1e-4, 1e-2)}
    refused(lambda: tuned(floor | low).fit(wait=False), "task.optim.min_learning_rate: the floor is above")
    given = estimator(job(), hyperparameters={"task.optim.learning_rate": 1e-4})
    refused(lambda: tuned(floor, est=given).fit(wait=False), "hyperparameter_ranges.task.optim.min_learning_rate")
    many = {f"task.optim.{name}": ContinuousParameter(0.1, 0.2) for name in ("weight_decay", "max_grad_norm", "eps")}
    many |= {"task.optim.warmup_fraction": ContinuousParameter(0.1, 0.2), "task.seed": IntegerParameter(1, 2)}
    tuned(many).fit(wait=False)
    refused(lambda: tuned(many | {"task.max_steps": ContinuousParameter(5, 9)}).fit(wait=False), "task.max_steps")
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["task.optim.learning_rate", "task.optim"])
def test_C8_a_hyperparameter_that_is_set_and_tuned_is_refused(name: str, calls: list[Any]) -> None:
    value: Any = 1e-4 if name.endswith("rate") else {"learning_rate": 1e-4}
    est = estimator(job(), hyperparameters={name: value})
    refused(lambda: tuned(RATE, est=est).fit(wait=False), "hyperparameter_ranges.task.optim.learning_rate", "no effect")
    inside = {"task.optim": CategoricalParameter(["{}"])}
    refused(lambda: tuned(RATE | inside).fit(wait=False), "set one field")
    assert not calls


@pytest.mark.parametrize(
    ("objective", "kind", "words"),
    [
        ("train:loss", "Maximize", "objective_type='Minimize'"),
        ("train:tokens_per_second_per_device", "Minimize", "objective_type='Maximize'"),
        ("train:mfu_percent", "Minimize", "objective_type='Maximize'"),
        ("train:learning_rate", "Minimize", "not its outcome"),
        ("train:step", "Maximize", "not its outcome"),
        ("validation:loss", "Minimize", "no validation rows"),
    ],
)
def test_C8_an_objective_that_finds_the_worst_trial_or_none_is_refused(
    objective: str, kind: str, words: str, calls: list[Any]
) -> None:
    refused(lambda: tuned(RATE, objective, kind).fit(wait=False), words)
    assert not calls


def test_C8_the_default_direction_of_the_sdk_is_refused_for_a_loss() -> None:
    from sagemaker.tuner import HyperparameterTuner

    tuner = HyperparameterTuner(estimator(job()), "train:loss", RATE, max_jobs=2)
    refused(lambda: tuner.fit(wait=False), "objective_type", "Minimize")


def test_C8_a_validation_objective_is_that_of_a_job_with_validation_rows(calls: list[Any]) -> None:
    task = {**TRAIN, "data": {**TRAIN["data"], "validation_rows": 8}}
    tuned(RATE, "validation:loss", est=estimator(job(task=task))).fit(wait=False)
    assert len(calls) == 1


def test_C8_a_tuners_own_rules_are_checked_and_reported_where_they_replace_ours(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for rule, words in (
        ({"Name": "a", "Regex": "a=[0-9]+"}, "no group"),
        ({"Name": "a", "Regex": "a=("}, "not a regular expression"),
        ({"Name": "a"}, "Regex"),
    ):
        refused(lambda rule=rule: tuned(RATE, metric_definitions=[rule]).fit(wait=False), "metric_definitions", words)  # type: ignore[misc]
    own = [{"Name": "train:loss", "Regex": "mine=(.*)"}, {"Name": "my_loss", "Regex": "my=(.*)"}]
    tuner = tuned(RATE, metric_definitions=own)
    tuner.fit(wait=False)
    assert "'mine=(.*)' replaces the rule of sm_llm for train:loss" in capsys.readouterr().err
    tuned(RATE, "my_loss", "Maximize", metric_definitions=own[1:]).fit(wait=False)
    assert "maximises my_loss" in capsys.readouterr().err
    tuned(RATE).fit(wait=False)
    assert "replaces" not in capsys.readouterr().err


def test_C8_what_bypasses_the_checks_of_trials_is_refused(calls: list[Any]) -> None:
    from sagemaker.tuner import HyperparameterTuner, InstanceConfig

    tuner = tuned(RATE)
    tuner.override_resource_config([InstanceConfig(instance_type="ml.p4d.24xlarge", instance_count=1)])
    refused(lambda: tuner.fit(wait=False), "override_resource_config", "instance_type")
    auto = HyperparameterTuner(estimator(job()), "train:loss", {}, objective_type="Minimize", autotune=True)
    refused(lambda: auto.fit(wait=False), "autotune", "hyperparameter_ranges")
    both = {"a": estimator(job("first"))}
    several = HyperparameterTuner.create(both, {"a": "train:loss"}, {"a": RATE})
    refused(lambda: several.fit(include_cls_metadata={}, wait=False), "objective_type", "Minimize")
    assert not calls
    assert BUCKET


def test_C8_an_argument_of_fit_that_the_sdk_drops_is_refused(calls: list[Any]) -> None:
    refused(lambda: tuned(RATE).fit(wait=False, banana=1), "fit(banana)", "the SDK drops it")
    assert not calls
    tuned(RATE).fit(wait=False, include_cls_metadata=False)
    assert calls[-1][0] == "CreateHyperParameterTuningJob"


def test_C8_a_channel_for_a_group_that_the_job_does_not_have_is_refused(calls: list[Any]) -> None:
    from sagemaker.inputs import TrainingInput

    channel = TrainingInput(f"s3://{BUCKET}/train/", instance_groups=["a"])
    script = estimator(job(task={"kind": "script", "entry": "-m x"}))
    refused(lambda: script.fit({"train": channel}, wait=False), "inputs.train.InstanceGroupNames", "It has none")
    assert not calls


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_jobs": 0}, ("max_jobs", "at least 1")),
        ({"max_jobs": "3"}, ("max_jobs", "cannot be sent")),
        ({"max_jobs": 2, "max_parallel_jobs": 3}, ("max_parallel_jobs", "at most max_jobs, which is 2")),
        ({"max_parallel_jobs": 0}, ("max_parallel_jobs", "at least 1")),
        ({"max_jobs": True}, ("max_jobs", "must be a number")),
        ({"random_seed": False}, ("random_seed", "must be a number")),
        ({"strategy": "Bayes"}, ("strategy", "Bayesian")),
        ({"strategy": "Grid"}, ("strategy", "CategoricalParameter for every range")),
        ({"early_stopping_type": "auto"}, ("early_stopping_type", "Auto")),
        ({"strategy": "Hyperband", "early_stopping_type": "Auto"}, ("early_stopping_type", "'Off'")),
        ({"random_seed": -1}, ("random_seed", "at least 0")),
        ({"max_runtime_in_seconds": 1}, ("max_runtime_in_seconds", "at least 120")),
        ({"tags": [{"Key": "a", "Value": "b!"}]}, ("tags.0.Value", "does not have the form")),
    ],
)
def test_settings_of_a_tuner_have_the_limits_of_the_service(
    settings: dict[str, Any], words: tuple[str, ...], calls: list[Any]
) -> None:
    from sagemaker.tuner import HyperparameterTuner

    tuner = HyperparameterTuner(
        estimator(job()), "train:loss", RATE, objective_type="Minimize", **{"max_jobs": 2, **settings}
    )
    refused(lambda: tuner.fit(wait=False), *words)
    assert not calls


def test_a_grid_takes_categories_and_their_number_of_jobs(calls: list[Any]) -> None:
    from sagemaker.tuner import HyperparameterTuner

    ranges = {"task.max_steps": CategoricalParameter([2, 4]), "task.seed": CategoricalParameter([1, 2, 3])}

    def grid(count: int | None) -> Any:
        return HyperparameterTuner(
            estimator(job()), "train:loss", ranges, objective_type="Minimize", strategy="Grid", max_jobs=count
        )

    for count in (None, 5):
        refused(lambda: grid(count).fit(wait=False), "max_jobs", "combinations of a Grid, 6", "Set max_jobs=6")  # noqa: B023
    grid(6).fit(wait=False)
    assert calls[-1][0] == "CreateHyperParameterTuningJob"


def test_tuning_jobs_of_one_spec_in_one_minute_have_names_of_their_own(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ({}, {}, {"base_tuning_job_name": "my_base!"}):
        tuned(RATE, est=estimator(job("small-model-of-a-long-name")), **more).fit(wait=False)
    names = [it["HyperParameterTuningJobName"] for _, it in calls]
    assert len(set(names)) == 3
    assert all(len(it) <= 32 for it in names)
    assert names[0].startswith("small-model-of-")
    assert names[2].startswith("my-base-")
    assert "the name begins with my-base" in capsys.readouterr().err
    refused(lambda: tuned(RATE).fit(wait=False, job_name="bad_name!"), "job_name", "does not have the form")
    tuned(RATE).fit(None, "mine", wait=False)
    assert calls[-1][1]["HyperParameterTuningJobName"] == "mine"


def test_arguments_that_the_sdk_passes_to_other_estimators_alone_are_refused(calls: list[Any]) -> None:
    refused(lambda: tuned(RATE).fit(wait=False, estimator_kwargs={"a": {}}), "fit(estimator_kwargs)", "no effect")
    assert not calls


def test_an_objective_of_the_training_line_is_not_that_of_a_program_that_writes_none(
    calls: list[Any], tmp_path: Path
) -> None:
    def script(text: str, objective: str = "train:loss", **more: Any) -> Any:
        (tmp_path / "train.py").write_text(text)
        task = {"kind": "script", "entry": "train.py", "source": str(tmp_path), "args": {"x": 1}}
        kind = "Maximize" if "tokens" in objective else "Minimize"
        ranges = {"task.args.x": IntegerParameter(1, 5)}
        return tuned(ranges, objective, kind, est=estimator(job(task=task)), **more)

    refused(lambda: script("print('x')").fit(wait=False), "objective_metric_name", "'Loss:'", "sm_llm.log(step, loss=")
    refused(lambda: script("print('Loss: 1')", "validation:loss").fit(wait=False), "'validation loss'")
    for program in ("print(f'Loss: {1.0}')", "import sm_llm\nsm_llm.log(1, loss=1.0)"):
        script(program).fit(wait=False)
    rule = {"Name": "train:loss", "Regex": "mine=(.*)"}
    script("print('mine=1')", metric_definitions=[rule]).fit(wait=False)
    assert [name for name, _ in calls] == ["CreateHyperParameterTuningJob"] * 3
