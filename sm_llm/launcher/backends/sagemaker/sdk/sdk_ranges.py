"""Ranges and settings of a tuning job: what the service would refuse, and values that the worker of a trial would."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import applied
from sm_llm.errors import Issue, PlanError, SpecError
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import fillings
from sm_llm.launcher.backends.sagemaker.pipelines.tuning_trials import SETTINGS, together_issues, trials, tried_numbers
from sm_llm.launcher.backends.sagemaker.request.limits import known_values, value_issues
from sm_llm.launcher.backends.sagemaker.sdk.sdk_overrides import hyperparameter_issues, is_variable, shown
from sm_llm.launcher.planner import load_whole, plan_loaded
from sm_llm.spec.comparison.leaves import leaves
from sm_llm.spec.field_classes import FREE
from sm_llm.spec.loading.yaml_text import to_typed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OPERATION = "CreateHyperParameterTuningJob"
_LOCATION = "HyperParameterTuningJobConfig.ParameterRanges.CategoricalParameterRanges.*"
_KINDS = ("Continuous", "Integer", "Categorical")
# Quota of the service; its model has a limit for each kind of range alone.
_MOST_RANGES = 30
# End of the codes of warnings of a value that the job does not read.
_UNREAD = "-without-effect"


def range_issues(ranges: Mapping[Any, Any], given: Mapping[str, Any]) -> Iterator[Issue]:
    """Issues of each range by itself, and beside the hyperparameters that the estimator is ``given``."""
    for name, value in ranges.items():
        yield from _own_issues(name, value)
    yield from _overlaps(list(ranges), given)
    if len(ranges) > _MOST_RANGES:
        problem = f"has {len(ranges)} ranges; a tuning job takes {_MOST_RANGES}"
        remedy = "Set the others in the specification"
        yield Issue("tuner-ranges-too-many", "hyperparameter_ranges", problem, remedy=remedy)


def free_issues(estimator: Any, ranges: Mapping[str, Any]) -> Iterator[Issue]:
    """Ranges of fields that change nothing in the result: all trials would be equal."""
    free = {it.path for it in leaves(estimator.submission.job.spec) if it.declared == FREE}
    for name in ranges:
        if any(path == name or path.startswith(f"{name}.") for path in free):
            problem = "changes nothing in the result, so that all trials would be equal"
            yield Issue(
                "tuner-range-of-free-field",
                f"hyperparameter_ranges.{name}",
                problem,
                remedy="Set it in the specification",
            )


def effect_issues(estimator: Any, ranges: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Issue]:
    """Ranges of settings that the job, as it is, does not read."""
    for name, value in ranges.items():
        # One value stands for the whole range: whether the job reads a setting does not depend on its value.
        texts = {key: json.dumps(it) for key, it in {**given, name: _tried(value)[-1]}.items() if not is_variable(it)}
        try:
            (changed,) = plan_loaded(load_whole(estimator.plan.job, applied(estimator.submission.job, texts)[1]))
        except (SpecError, PlanError):
            continue  # it may fit beside the other ranges alone; those are tried together elsewhere
        for found in changed.issues:
            if found.code.endswith(_UNREAD) and found.path == name:
                where = f"hyperparameter_ranges.{name}"
                yield Issue("tuner-range-without-effect", where, found.message, remedy="Leave it out")


def _own_issues(name: Any, value: Any) -> Iterator[Issue]:
    """Issues of one range by itself."""
    if not isinstance(name, str):
        problem = "a name must be text, not a pipeline variable"
        yield Issue(
            "range-name-is-variable",
            "hyperparameter_ranges",
            problem,
            getattr(name, "expr", name),
            "Write the name itself",
        )
        return
    path, kind = f"hyperparameter_ranges.{name}", getattr(value, "__name__", None)
    if kind not in _KINDS:
        remedy = "Give a ContinuousParameter, IntegerParameter or CategoricalParameter"
        yield Issue("range-invalid", path, "is not a range of the SDK", shown(value), remedy)
    elif any(map(is_variable, vars(value).values())):
        problem = "must hold values, not pipeline variables: trials are checked before they start"
        yield Issue(
            "range-holds-variable",
            path,
            problem,
            remedy="Write numbers or text; hyperparameters of the estimator take variables",
        )
    elif kind == "Categorical":
        for issue in value_issues(_LOCATION, value.as_json_range(name), path, _OPERATION):
            yield replace(issue, path=issue.path.replace(f"{path}.Values", path, 1))
        if len(set(value.values)) < len(value.values):
            yield Issue("range-value-repeated", path, "has a value twice", value.values, "Keep one of the two")
    else:
        yield from _bound_issues(path, value, kind)


def _bound_issues(path: str, value: Any, kind: str) -> Iterator[Issue]:
    low, high = value.min_value, value.max_value
    wanted = int if kind == "Integer" else (int, float)
    for bound in (low, high):
        if isinstance(bound, bool) or not isinstance(bound, wanted) or not math.isfinite(bound):
            yield Issue(
                "range-bound-not-a-number",
                path,
                f"a bound must be a {'whole ' if kind == 'Integer' else ''}number",
                bound,
                "Correct it",
            )
            return
    if low >= high:
        problem = "must begin below its end" if low > high else "holds one value only"
        remedy = f"Write {type(value).__name__}({high}, {low})" if low > high else "Write it into the specification"
        yield Issue("range-bounds-reversed", path, problem, [low, high], remedy)
        return
    scale, known = value.scaling_type, known_values("HyperParameterScalingType")
    if scale not in known:
        yield Issue("range-scale-unknown", path, "is not a scale of a range", scale, f"Write one of {', '.join(known)}")
    elif scale == "Logarithmic" and low <= 0:
        yield Issue(
            "range-scale-needs-positive",
            path,
            "a logarithmic scale needs values above 0",
            low,
            "Raise the lower bound, or use Linear",
        )
    elif scale == "ReverseLogarithmic" and (kind == "Integer" or low < 0 or high >= 1):
        problem = "a reverse logarithmic scale needs a continuous range from 0 to below 1"
        yield Issue("range-scale-needs-fraction", path, problem, [low, high], "Use Linear, or other bounds")


def _overlaps(names: list[Any], given: Mapping[str, Any]) -> Iterator[Issue]:
    """Names that are set as well, or lie inside another: one of the two would have no effect."""
    texts = [name for name in names if isinstance(name, str)]
    for name, other in itertools.product(texts, given):
        if _overlap(name, other):
            problem = f"is tuned, so the hyperparameter {other} of the estimator has no effect"
            yield Issue(
                "range-overrides-hyperparameter",
                f"hyperparameter_ranges.{name}",
                problem,
                shown(given[other]),
                "Leave one of the two out",
            )
    for name, other in itertools.combinations(texts, 2):
        if _overlap(name, other):
            problem = f"and the range of {other} set one field"
            yield Issue("ranges-overlap", f"hyperparameter_ranges.{name}", problem, remedy="Leave one of the two out")


def _overlap(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def trial_issues(estimator: Any, ranges: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Issue]:
    """The first issue of a trial: its values as the worker reads them, all together and with those that are set."""
    for values in trials({name: _tried(value) for name, value in ranges.items()}):
        for issue in hyperparameter_issues(estimator.submission, estimator.plan, {**given, **values}):
            yield _of_ranges(issue, estimator, ranges, values, given)
            return


def _of_ranges(
    issue: Issue, estimator: Any, ranges: Mapping[str, Any], values: Mapping[str, Any], given: Mapping[str, Any]
) -> Issue:
    """An issue of a trial under the name of the range that leads to it, or with all values of the trial."""
    path = issue.path.removeprefix("hyperparameters.")
    name = next((it for it in values if _overlap(it, path)), None)
    # The range that the issue names, or else every one that could be the cause.
    for tuned in [name] if name is not None else values:
        if remedy := _working(estimator, ranges[tuned], tuned, {**given, **values}):
            message = issue.message if tuned == name else f"{path}: {issue.message}"
            return replace(
                issue, path=f"hyperparameter_ranges.{tuned}", message=message, value=values[tuned], remedy=remedy
            )
    if name is not None:
        return replace(issue, path=f"hyperparameter_ranges.{name}", value=values[name])
    trial = ", ".join(f"{key}={to_typed(value)}" for key, value in values.items())
    return replace(issue, path="hyperparameter_ranges", message=f"a trial has {trial}: {issue}")


def _working(estimator: Any, value: Any, name: str, trial: Mapping[str, Any]) -> str:
    """What to write in place of a range of whole numbers of which some work; empty for any other."""
    # Fractions that work cannot be listed, and categories are a list already.
    if value.__name__ != "Integer":
        return ""
    tried = _tried(value)

    def works(number: int) -> bool:
        return not any(hyperparameter_issues(estimator.submission, estimator.plan, {**trial, name: number}))

    fitting = [it for it in tried if works(it)]
    is_whole = len(tried) == value.max_value - value.min_value + 1
    if len(fitting) < 2:
        return ""
    shown_values = ", ".join(map(str, fitting if is_whole else [*fitting, "..."]))
    return f"Write CategoricalParameter([{shown_values}])"


def _tried(value: Any) -> list[Any]:
    """Values of a range that are tried."""
    kind = value.__name__
    return list(value.values) if kind == "Categorical" else tried_numbers(kind, value.min_value, value.max_value)


def setting_issues(tuner: Any, job_name: Any) -> Iterator[Issue]:
    """What the service would refuse of a tuner's own settings, after the code had been stored."""
    found: list[Issue] = []
    if job_name is not None:
        found += value_issues("HyperParameterTuningJobName", job_name, "job_name", _OPERATION)
    values: dict[str, Any] = {}
    for name, location in SETTINGS.items():
        given = getattr(tuner, name, None)
        as_request = getattr(given, "to_input_req", None)
        for value in () if given is None else fillings(given if as_request is None else as_request()):
            values.setdefault(name, value)
            found += value_issues(location, value, name, _OPERATION)
    # Compared only where each is possible by itself.
    ranges = list(_ranges_of(tuner))
    kinds = [name for it in ranges if (name := getattr(it, "__name__", "")) != "Categorical"]
    counts = [len(it.values) for it in ranges if getattr(it, "__name__", "") == "Categorical"]
    yield from found or together_issues(values, kinds, counts)


def _ranges_of(tuner: Any) -> Iterator[Any]:
    several = getattr(tuner, "_hyperparameter_ranges_dict", None) or {"": tuner._hyperparameter_ranges}
    for ranges in several.values():
        yield from (ranges or {}).values()
