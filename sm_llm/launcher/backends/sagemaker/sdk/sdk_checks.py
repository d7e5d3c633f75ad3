"""The phase arguments of the checks: what calls of the SageMaker SDK give our estimators, their tuners and pipelines.

Each list holds the checkers of one call, in the order in which their issues are reported. A call is refused before
anything is stored: the SDK stores code first, and much of what it is given it drops or passes on unread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError, SpecError
from sm_llm.launcher.backends.sagemaker.request.request import (
    BETTER,
    METRICS,
    VALIDATION,
    line_word,
    request_region,
)
from sm_llm.launcher.backends.sagemaker.sdk.estimator_address import address_issues, result_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_arguments import arguments
from sm_llm.launcher.backends.sagemaker.sdk.sdk_attributes import changed_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_overrides import (
    argument_issues,
    example_fields,
    fit_issues,
    hyperparameter_issues,
    known_fields,
    shown,
    twice_issues,
)
from sm_llm.launcher.backends.sagemaker.sdk.sdk_passed import option_issues, passed_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_ranges import (
    effect_issues,
    free_issues,
    range_issues,
    setting_issues,
    trial_issues,
)
from sm_llm.launcher.backends.sagemaker.sdk.sdk_session import (
    defaults_of,
    is_pipeline,
    region_issues,
    session_issues,
    variable_issues,
)
from sm_llm.launcher.backends.sagemaker.sdk.staged import planned
from sm_llm.launcher.planning.unread_settings import has_validation
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.validation.fields import did_you_mean
from sm_llm.spec.validation.runner import blocked_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.loading.load import Loaded
    from sm_llm.spec.loading.overrides import Override
    from sm_llm.spec.validation.runner import Checker

# Bytes of a file of a program that is searched for what it prints.
_LARGEST_PROGRAM = 2**20
# Attribute of an estimator that ``HyperparameterTuner`` drops -> where it was given, and what a tuning job does.
_LOST = {
    "keep_alive_period_in_seconds": ("backend.keep_alive_period_in_seconds", "keeps no warm pool"),
    "training_plan": ("backend.training_plan_arn", "cannot run in a training plan"),
    "instance_groups": ("backend.instance_groups", "has no instance groups"),
    "_enable_remote_debug": ("backend.remote_debug", "allows no shell in its containers"),
    "enable_infra_check": ("enable_infra_check", "makes no infrastructure check"),
    "_enable_session_tag_chaining": ("enable_session_tag_chaining", "chains no session tags"),
    "instance_placement_config": ("instance_placement_config", "places no instances"),
}


@dataclass(frozen=True)
class EstimatorCall:
    """A call of ``sm_llm.estimator``. ``kind`` is the SDK's class, ``arguments`` are those of it by name."""

    kind: Any
    session: Any
    arguments: Mapping[str, Any]


def check_session(call: EstimatorCall) -> Iterator[Issue]:
    """A session that is none, or that starts containers on this machine."""
    yield from session_issues(call.session)


def check_arguments(call: EstimatorCall) -> Iterator[Issue]:
    """Arguments that the SDK does not have, that have no effect, or whose values cannot be variables."""
    yield from argument_issues(call.kind, call.arguments)


ESTIMATOR_CHECKERS: tuple[Checker[EstimatorCall], ...] = (check_session, check_arguments)


@dataclass(frozen=True)
class GivenFields:
    """Values of the specification that one call gives by several ways: ``arguments`` stand for fields by path."""

    arguments: Mapping[str, Any]
    hyperparameters: Any
    overrides: Sequence[Override]
    fields: Mapping[str, Any]


def check_given_twice(given: GivenFields) -> Iterator[Issue]:
    """Values that are given twice: one of the two would have no effect."""
    yield from twice_issues(given.arguments, given.hyperparameters, given.overrides, given.fields)


FIELD_CHECKERS: tuple[Checker[GivenFields], ...] = (check_given_twice,)


@dataclass(frozen=True)
class JobOfVariables:
    """A job of which pipeline variables stand for fields, and the arguments that are no fields."""

    loaded: Loaded
    rest: Mapping[str, Any]


def check_known_values(it: JobOfVariables) -> Iterator[Issue]:
    """Defaults and other choices of pipeline variables that stand for fields: as of the values themselves."""
    for changed in known_fields(it.rest):
        if found := _changed_issues(it.loaded, changed):
            yield from (replace(issue, origin="a default or choice of its variable") for issue in found)
            return  # another choice would repeat them


def check_possible_values(it: JobOfVariables) -> Iterator[Issue]:
    """Pipeline variables of which only the type is known, for fields that take no value of the type."""
    first = next(known_fields(it.rest), {})
    # What the others are refused for, no value of this one repairs.
    several = [] if first and _changed_issues(it.loaded, first) else example_fields(it.rest)
    for target, variable, examples in several:
        tried = (_changed_issues(it.loaded, {**first, target: example}) for example in examples)
        if len(refused := list(itertools.takewhile(bool, tried))) == len(examples):
            yield from (replace(issue, value=shown(variable)) for issue in refused[0])


def _changed_issues(loaded: Loaded, changed: Mapping[str, Any]) -> list[Issue]:
    """What the plan refuses of a job with other values of some fields."""
    from sm_llm.launcher.planner import load_whole

    try:
        planned(load_whole(loaded.spec, fields=changed))
    except (SpecError, PlanError) as error:
        return list(error.issues)
    return []


KNOWN_VALUE_CHECKERS: tuple[Checker[JobOfVariables], ...] = (check_known_values, check_possible_values)


@dataclass(frozen=True)
class GivenToJob:
    """Arguments of the SDK that a job, which is planned and rendered, gets beside its specification."""

    session: Any
    submission: Submission
    plan: Plan
    arguments: Mapping[str, Any]


def check_region(given: GivenToJob) -> Iterator[Issue]:
    """A session of another region than the job's."""
    yield from region_issues(given.session, request_region(given.submission.request))


def check_passed_arguments(given: GivenToJob) -> Iterator[Issue]:
    """Arguments that go into the request as given."""
    own = given.submission.request["AlgorithmSpecification"].get("MetricDefinitions", ())
    yield from passed_issues(given.arguments, own)


def check_hyperparameters(given: GivenToJob) -> Iterator[Issue]:
    """Hyperparameters that the service or the worker would refuse."""
    with defaults_of(given.session, given.arguments):
        found = list(hyperparameter_issues(given.submission, given.plan, given.arguments.get("hyperparameters") or {}))
    yield from found


def check_variables(given: GivenToJob) -> Iterator[Issue]:
    """Pipeline variables in a job that starts at once."""
    yield from variable_issues(given.session, given.arguments)


def check_groups(given: GivenToJob) -> Iterator[Issue]:
    """Several instance groups that start processes together: the SDK distributes over one group alone."""
    sent = arguments(given.submission.request)
    groups = sent.get("instance_groups", ())
    if len(groups) > 1 and "distribution" in sent:
        problem = "has several groups, and the SDK starts distributed processes in one group only"
        remedy = "Give one group, or start the job with sm_llm.launch(), which sends all of them"
        seen = [it.instance_group_name for it in groups]
        yield Issue("instance-groups-distributed", "backend.instance_groups", problem, seen, remedy)


JOB_ARGUMENT_CHECKERS: tuple[Checker[GivenToJob], ...] = (
    check_region,
    check_passed_arguments,
    check_hyperparameters,
    check_variables,
    check_groups,
)


def check_attributes(estimator: Any) -> Iterator[Issue]:
    """Attributes that were set after the estimator was built."""
    yield from changed_issues(estimator, estimator._built)


ATTRIBUTE_CHECKERS: tuple[Checker[Any], ...] = (check_attributes,)
"""Of every use of an estimator that was built."""


@dataclass(frozen=True)
class FitCall:
    """A call of ``fit``, or of a tuner's. ``inputs`` by name; ``options`` are the keywords that the SDK passes on."""

    session: Any
    submission: Submission
    inputs: Mapping[str, Any]
    job_name: Any = None
    logs: Any = "All"
    options: Mapping[str, Any] | None = None


def check_fit_inputs(call: FitCall) -> Iterator[Issue]:
    """Inputs and a name that the SDK or the service would refuse."""
    yield from fit_issues(call.submission, call.inputs, call.job_name)


def check_input_values(call: FitCall) -> Iterator[Issue]:
    """Pipeline variables in inputs of a job that starts at once."""
    named = {name: it for name, it in call.inputs.items() if isinstance(name, str)}
    yield from variable_issues(
        call.session, {f"inputs.{name}": getattr(it, "config", it) for name, it in named.items()}
    )


def check_fit_options(call: FitCall) -> Iterator[Issue]:
    """Keywords of ``fit`` beside its inputs."""
    yield from option_issues(call.options or {}, call.logs)


FIT_CHECKERS: tuple[Checker[FitCall], ...] = (check_fit_inputs, check_input_values, check_fit_options)


@dataclass(frozen=True)
class StepCall:
    """A step of a hand-written pipeline: the address that follows its specification, and what it is given beside it."""

    base: str
    given: Mapping[str, Any]


def check_address(call: StepCall) -> Iterator[Issue]:
    """Variables that cannot be part of the address of a run."""
    yield from address_issues(call.base, call.given)


def check_result(address: Any) -> Iterator[Issue]:
    """An address of a run below which a next step cannot read."""
    yield from result_issues(address)


STEP_CHECKERS: tuple[Checker[StepCall], ...] = (check_address,)
RESULT_CHECKERS: tuple[Checker[Any], ...] = (check_result,)


@dataclass(frozen=True)
class PipelineSessionCall:
    """The session of a pipeline that is built from a workflow, whose jobs run in ``region``."""

    session: Any
    region: str


def check_pipeline_session(call: PipelineSessionCall) -> Iterator[Issue]:
    """A session that would start the jobs of the steps at once."""
    if call.session is not None and not is_pipeline(call.session):
        problem = "must be a PipelineSession: with any other the steps would start at once"
        remedy = "Give a PipelineSession, or leave it out"
        found = type(call.session).__name__
        yield Issue("pipeline-session-expected", "sagemaker_session", problem, found, remedy)


def check_pipeline_region(call: PipelineSessionCall) -> Iterator[Issue]:
    """A session that would store the pipeline in another region."""
    if call.session is not None:
        yield from region_issues(call.session, call.region)


PIPELINE_SESSION_CHECKERS: tuple[Checker[PipelineSessionCall], ...] = (check_pipeline_session, check_pipeline_region)


@dataclass(frozen=True)
class TunerCall:
    """A call of ``fit`` of a tuner; ``dropped`` are arguments that the SDK takes and does not read."""

    tuner: Any
    dropped: frozenset[str]
    job_name: Any = None


def check_tuner_arguments(call: TunerCall) -> Iterator[Issue]:
    """Arguments that nothing reads."""
    for name in sorted(call.dropped):
        own = name == "estimator_kwargs"
        problem = "has no effect on these estimators" if own else "is not an argument of a tuner's fit"
        yield Issue("tuner-fit-argument-unknown", f"fit({name})", f"{problem}; the SDK drops it", remedy="Leave it out")


def check_tuner_settings(call: TunerCall) -> Iterator[Issue]:
    """Settings of the tuner itself that would bypass the checks of its jobs."""
    if getattr(call.tuner, "autotune", False):
        problem = "would choose ranges by itself, those of the training toolkit's hyperparameters among them"
        yield Issue("tuner-autotune-unsupported", "autotune", problem, True, "Give hyperparameter_ranges")
    if getattr(call.tuner, "instance_configs", None) or getattr(call.tuner, "instance_configs_dict", None):
        problem = "would start trials on machines that the job was not planned for"
        remedy = "Build the estimator with instance_type and instance_count"
        yield Issue("tuner-resources-unsupported", "override_resource_config", problem, remedy=remedy)


def check_tuner_limits(call: TunerCall) -> Iterator[Issue]:
    """Settings that the service would refuse, and a name of the job that is none."""
    yield from setting_issues(call.tuner, call.job_name)


TUNER_CHECKERS: tuple[Checker[TunerCall], ...] = (check_tuner_arguments, check_tuner_settings, check_tuner_limits)


@dataclass(frozen=True)
class TunerTrials:
    """The trials of one estimator of a tuner. ``definitions`` are the metric definitions that the tuner was given."""

    estimator: Any
    objective: Any
    direction: Any
    ranges: Mapping[Any, Any]
    definitions: Sequence[Mapping[str, str]]

    @property
    def own_definitions(self) -> dict[str, dict[str, str]]:
        """Metric definitions of the estimator, by name."""
        return {it["Name"]: it for it in self.estimator.metric_definitions or []}

    @property
    def all_definitions(self) -> dict[str, Mapping[str, str]]:
        """Those of both, by name."""
        return {**self.own_definitions, **{it["Name"]: it for it in self.definitions}}


def check_lost_settings(trials: TunerTrials) -> Iterator[Issue]:
    """Settings of the estimator that a tuning job does not have."""
    if trials.estimator.arguments_given.get("enable_sagemaker_metrics"):
        problem = "has no effect: a tuning job shows no metrics over time"
        yield Issue("tuner-has-no-metrics-series", "enable_sagemaker_metrics", problem, True, "Leave it out")
    for attribute, (path, lacks) in _LOST.items():
        if getattr(trials.estimator, attribute, None):
            remedy = "Leave it out, or launch the trials as jobs of their own"
            yield Issue("tuner-setting-without-effect", path, f"has no effect: a tuning job {lacks}", remedy=remedy)


def check_objective_type(trials: TunerTrials) -> Iterator[Issue]:
    """An objective that only a pipeline knows."""
    if hasattr(trials.objective, "expr"):
        problem = "must be text, not a pipeline variable"
        yield Issue("tuner-objective-is-variable", "objective_metric_name", problem, remedy="Write the name itself")


def check_ranges(trials: TunerTrials) -> Iterator[Issue]:
    """Each range by itself, and names that are set twice."""
    yield from range_issues(trials.ranges, trials.estimator.hyperparameters_given)


@blocked_by("hyperparameter_ranges")
def check_free_ranges(trials: TunerTrials) -> Iterator[Issue]:
    """Ranges that make no difference between trials."""
    yield from free_issues(trials.estimator, trials.ranges)


@blocked_by("hyperparameter_ranges")
def check_trials(trials: TunerTrials) -> Iterator[Issue]:
    """Values of trials that the worker would refuse."""
    with defaults_of(trials.estimator.sagemaker_session, trials.estimator.arguments_given):
        found = list(trial_issues(trials.estimator, trials.ranges, trials.estimator.hyperparameters_given))
    yield from found


@blocked_by("hyperparameter_ranges")
def check_read_ranges(trials: TunerTrials) -> Iterator[Issue]:
    """Ranges of settings that the job does not read."""
    with defaults_of(trials.estimator.sagemaker_session, trials.estimator.arguments_given):
        found = list(effect_issues(trials.estimator, trials.ranges, trials.estimator.hyperparameters_given))
    yield from found


def check_metric_definitions(trials: TunerTrials) -> Iterator[Issue]:
    """Metric definitions of the tuner, together with the estimator's."""
    given = {"metric_definitions": trials.definitions or None}
    yield from passed_issues(given, list(trials.own_definitions.values()))


@blocked_by("metric_definitions", "tuner-objective-is-variable")
def check_objective(trials: TunerTrials) -> Iterator[Issue]:
    """An objective that no trial would report, or that is not an outcome."""
    objective, path, names = trials.objective, "objective_metric_name", list(trials.all_definitions)
    task = trials.estimator.submission.job.spec.task
    others = "Set backend.metric_definitions=true"
    if objective is None:
        problem, remedy = (
            "is missing: a tuning job compares its trials by a metric",
            f"Give one of {', '.join(names)}" if names else others,
        )
        yield Issue("tuner-without-objective", path, problem, remedy=remedy)
    elif objective not in names:
        problem = "no metric definition has this name, so no trial would report it"
        known = f"Known: {', '.join(names)}" if names else others
        remedy = f"{did_you_mean(objective, names)} {known}".strip()
        yield Issue("tuner-objective-unknown", path, problem, objective, remedy)
    elif objective == VALIDATION and isinstance(task, TrainTask) and not has_validation(task):
        problem = "no trial would report it: the job has no validation rows"
        remedy = "Set task.data.validation, or choose train:loss"
        yield Issue("tuner-objective-without-validation", path, problem, objective, remedy)
    elif objective in METRICS and objective not in BETTER:
        problem, remedy = "is a setting of a trial, not its outcome", f"Choose one of {', '.join(BETTER)}"
        yield Issue("tuner-objective-is-a-setting", path, problem, objective, remedy)


@blocked_by("metric_definitions", "objective_metric_name")
def check_written_objective(trials: TunerTrials) -> Iterator[Issue]:
    """A rule of our own training line as the objective of a job that writes none of it."""
    objective, estimator = trials.objective, trials.estimator
    is_given = objective in {it["Name"] for it in trials.definitions}
    if objective not in METRICS or is_given or isinstance(estimator.submission.job.spec.task, TrainTask):
        return
    program, word = estimator.plan.target.program, line_word(objective)
    texts = [_text_of(it) for it in program.files.values()] if program is not None else []
    has_calls = objective == "train:loss" and any("sm_llm" in it and "log(" in it for it in texts)
    if not has_calls and not any(word in it for it in texts):
        problem = f"is read from {word!r} in the log, which no file of the program writes: no trial would report it"
        remedy = "Give the tuner metric_definitions for what the job prints"
        if objective == "train:loss":
            remedy += ", or call sm_llm.log(step, loss=...) in the program"
        yield Issue("tuner-objective-not-written", "objective_metric_name", problem, objective, remedy)


def _text_of(file: Path) -> str:
    """A file of a program, where it may be one that prints: data are larger."""
    return "" if file.stat().st_size > _LARGEST_PROGRAM else file.read_text(encoding="utf-8", errors="replace")


@blocked_by("metric_definitions", "tuner-objective-is-variable")
def check_direction(trials: TunerTrials) -> Iterator[Issue]:
    """An objective that is taken for its opposite."""
    right = BETTER.get(trials.objective) if trials.objective in trials.all_definitions else None
    # A pipeline variable is no text.
    if isinstance(trials.direction, str) and right is not None and trials.direction != right:
        problem = f"would look for the worst trial by {trials.objective}"
        remedy = f"Write objective_type={right!r}"
        yield Issue("tuner-direction-reversed", "objective_type", problem, trials.direction, remedy)


TRIAL_CHECKERS: tuple[Checker[TunerTrials], ...] = (
    check_lost_settings,
    check_objective_type,
    check_ranges,
    check_free_ranges,
    check_trials,
    check_read_ranges,
    check_metric_definitions,
    check_objective,
    check_written_objective,
    check_direction,
)
