"""Tuning jobs of the SageMaker SDK on our estimators: what a tuner would lose is refused, what it lacks is added.

``HyperparameterTuner`` asks an estimator for a few of its settings and drops the others, so the checks are made when
its ``fit`` is called. The SDK offers no hook there; ``fit`` of the class is wrapped once, and passes tuners of other
estimators through.
"""

from __future__ import annotations

import functools
import inspect
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.backends.sagemaker.request.request import BETTER, METRICS, VALIDATION, normalised
from sm_llm.launcher.backends.sagemaker.sdk.sdk_passed import passed_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_ranges import range_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_session import defaults_of
from sm_llm.launcher.planning.checks import has_validation
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.validation.fields import did_you_mean
from sm_llm.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_SMALL_IS_GOOD = re.compile(r"loss|perplexity|ppl|error|(?:^|[^a-z])[cw]er(?:[^a-z]|$)", re.IGNORECASE)
"""Names of a user's own metrics that are hardly to be maximised."""

_LOST = {
    "keep_alive_period_in_seconds": ("backend.keep_alive_period_in_seconds", "keeps no warm pool"),
    "training_plan": ("backend.training_plan_arn", "cannot run in a training plan"),
    "instance_groups": ("backend.instance_groups", "has no instance groups"),
    "_enable_remote_debug": ("backend.remote_debug", "allows no shell in its containers"),
    "enable_infra_check": ("enable_infra_check", "makes no infrastructure check"),
    "_enable_session_tag_chaining": ("enable_session_tag_chaining", "chains no session tags"),
    "instance_placement_config": ("instance_placement_config", "places no instances"),
}
"""Attribute of an estimator that ``HyperparameterTuner`` drops -> where it was given, and what a tuning job does."""


def watch_tuners() -> None:
    """Make ``HyperparameterTuner.fit`` prepare tuners of our estimators."""
    from sagemaker.tuner import HyperparameterTuner

    original = HyperparameterTuner.fit
    if hasattr(original, "prepares_runs"):
        return

    # The SDK takes any further keyword, and passes it on to estimators of its built-in algorithms alone.
    known = set(inspect.signature(original).parameters)

    @functools.wraps(original)
    def fit(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, _prepared(self, inputs, set(kwargs) - known), *args, **kwargs)

    prepare = HyperparameterTuner._prepare_estimator_for_tuning

    def prepare_estimator(cls: Any, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Called by ``fit`` alone, in a pipeline when it is defined; ``TuningStep(tuner=…)`` does without."""
        with estimator.fitting() if hasattr(estimator, "run_uri") else nullcontext():
            prepare(estimator, *args, **kwargs)

    fit.prepares_runs = True  # type: ignore[attr-defined]
    HyperparameterTuner.fit = fit
    HyperparameterTuner._prepare_estimator_for_tuning = classmethod(prepare_estimator)


def _prepared(tuner: Any, inputs: Any, dropped: Iterable[str] = ()) -> Any:
    """The inputs of a tuner's ``fit`` with those of the jobs; the tuner gets what it lacks.

    ``dropped`` are arguments that the SDK takes and does not read. Raises ``PlanError`` for what a tuning job cannot.
    """
    if tuner.estimator is not None:
        if not hasattr(tuner.estimator, "run_uri"):
            return inputs
        _refuse(_tuner_issues(tuner, dropped))
        tuner.estimator = tuner.estimator.for_tuner()
        one = _Tuned(tuner, tuner.estimator, tuner.objective_metric_name, tuner._hyperparameter_ranges or {})
        tuner.metric_definitions = one.checked(tuner.metric_definitions)
        # The SDK would name the tuning job after the image.
        tuner.base_tuning_job_name = tuner.base_tuning_job_name or _base_name(tuner.estimator)
        return tuner.estimator.inputs_of(inputs)
    ours = {name: it for name, it in tuner.estimator_dict.items() if hasattr(it, "run_uri")}
    found = dict(inputs or {})
    if ours:
        _refuse(_tuner_issues(tuner, dropped))
    for name, given in ours.items():
        tuner.estimator_dict[name] = estimator = given.for_tuner()
        ranges = tuner._hyperparameter_ranges_dict[name] or {}
        one = _Tuned(tuner, estimator, tuner.objective_metric_name_dict[name], ranges)
        tuner.metric_definitions_dict[name] = one.checked(tuner.metric_definitions_dict.get(name))
        tuner.base_tuning_job_name = tuner.base_tuning_job_name or _base_name(estimator)
        if (own := estimator.inputs_of(found.get(name))) is not None:
            found[name] = own
    return found or None


def _refuse(issues: Iterable[Issue]) -> None:
    if found := list(issues):
        raise PlanError(found)


def _tuner_issues(tuner: Any, dropped: Iterable[str]) -> Iterator[Issue]:
    """Settings of the tuner itself that would bypass the checks of its jobs, and arguments that nothing reads."""
    for name in sorted(dropped):
        problem = "is not an argument of a tuner's fit; the SDK drops it"
        yield Issue("tuner-fit-argument-unknown", f"fit({name})", problem, remedy="Leave it out")
    if getattr(tuner, "autotune", False):
        problem = "would choose ranges by itself, those of the training toolkit's hyperparameters among them"
        yield Issue("tuner-autotune-unsupported", "autotune", problem, True, "Give hyperparameter_ranges")
    if getattr(tuner, "instance_configs", None) or getattr(tuner, "instance_configs_dict", None):
        problem = "would start trials on machines that the job was not planned for"
        remedy = "Build the estimator with instance_type and instance_count"
        yield Issue("tuner-resources-unsupported", "override_resource_config", problem, remedy=remedy)


class _Tuned:
    """One estimator of a tuner, with its objective and ranges."""

    def __init__(self, tuner: Any, estimator: Any, objective: Any, ranges: Mapping[Any, Any]) -> None:
        self._direction = tuner.objective_type
        self._estimator = estimator
        self._objective = objective
        self._ranges = ranges

    def checked(self, definitions: list[dict[str, str]] | None) -> list[dict[str, str]]:
        """The tuner's metric definitions and the estimator's. Raises ``PlanError`` with all issues of trials."""
        own = {it["Name"]: it for it in self._estimator.metric_definitions or []}
        with defaults_of(self._estimator.sagemaker_session):
            ranges = range_issues(self._estimator, self._ranges)
        _refuse([
            *self._lost_issues(), *ranges,
            *passed_issues({"metric_definitions": definitions or None}, list(own.values())),
        ])  # fmt: skip
        given = {it["Name"]: it for it in definitions or []}
        merged = {**own, **given}
        _refuse(self._objective_issues(list(merged)))
        for name in sorted(set(METRICS) & set(given)):
            if given[name] != own.get(name, given[name]):
                _warn(f"metric_definitions: {given[name]['Regex']!r} replaces the rule of sm_llm for {name}")
        return list(merged.values())

    def _lost_issues(self) -> Iterator[Issue]:
        if self._estimator.arguments_given.get("enable_sagemaker_metrics"):
            problem = "has no effect: a tuning job shows no metrics over time"
            yield Issue("tuner-has-no-metrics-series", "enable_sagemaker_metrics", problem, True, "Leave it out")
        for attribute, (path, lacks) in _LOST.items():
            if getattr(self._estimator, attribute, None):
                remedy = "Leave it out, or launch the trials as jobs of their own"
                yield Issue("tuner-setting-without-effect", path, f"has no effect: a tuning job {lacks}", remedy=remedy)
        if hasattr(self._objective, "expr"):
            problem = "must be text, not a pipeline variable"
            yield Issue("tuner-objective-is-variable", "objective_metric_name", problem, remedy="Write the name itself")

    def _objective_issues(self, names: list[str]) -> Iterator[Issue]:
        objective, path = self._objective, "objective_metric_name"
        if objective is None:
            listed = f"Give one of {', '.join(names)}" if names else "Set backend.metric_definitions=true"
            yield Issue(
                "tuner-without-objective",
                path,
                "is missing: a tuning job compares its trials by a metric",
                remedy=listed,
            )
            return
        if objective not in names:
            listed = f"Known: {', '.join(names)}" if names else "Set backend.metric_definitions=true"
            remedy = f"{did_you_mean(objective, names)} {listed}".strip()
            yield Issue(
                "tuner-objective-unknown",
                path,
                "no metric definition has this name, so no trial would report it",
                objective,
                remedy,
            )
            return
        task = self._estimator.submission.job.spec.task
        if objective == VALIDATION and isinstance(task, TrainTask) and not has_validation(task):
            problem = "no trial would report it: the job has no validation rows"
            yield Issue(
                "tuner-objective-without-validation",
                path,
                problem,
                objective,
                "Set task.data.validation, or choose train:loss",
            )
        elif objective in METRICS and objective not in BETTER:
            outcomes = ", ".join(BETTER)
            yield Issue(
                "tuner-objective-is-a-setting",
                path,
                "is a setting of a trial, not its outcome",
                objective,
                f"Choose one of {outcomes}",
            )
        yield from self._direction_issues()

    def _direction_issues(self) -> Iterator[Issue]:
        right = BETTER.get(self._objective)
        if not isinstance(self._direction, str):
            return  # a pipeline variable
        if right is not None and self._direction != right:
            problem = f"would look for the worst trial by {self._objective}"
            yield Issue(
                "tuner-direction-reversed",
                "objective_type",
                problem,
                self._direction,
                f"Write objective_type={right!r}",
            )
        elif right is None and self._direction == "Maximize" and _SMALL_IS_GOOD.search(self._objective):
            _warn(f"objective_type: the tuning job maximises {self._objective}; objective_type='Minimize' minimises it")


def _warn(text: str) -> None:
    say(f"  warning: {text}", err=True)


def _base_name(estimator: Any) -> str:
    spec = estimator.submission.job.spec
    return normalised(spec.backend.base_job_name or spec.name)
