"""What a tuning job tries: values of its ranges, and settings of its own that do not fit one another."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_CONFIG = "HyperParameterTuningJobConfig"
SETTINGS = {
    "strategy": f"{_CONFIG}.Strategy",
    "max_jobs": f"{_CONFIG}.ResourceLimits.MaxNumberOfTrainingJobs",
    "max_parallel_jobs": f"{_CONFIG}.ResourceLimits.MaxParallelTrainingJobs",
    "max_runtime_in_seconds": f"{_CONFIG}.ResourceLimits.MaxRuntimeInSeconds",
    "early_stopping_type": f"{_CONFIG}.TrainingJobEarlyStoppingType",
    "objective_type": f"{_CONFIG}.HyperParameterTuningJobObjective.Type",
    "random_seed": f"{_CONFIG}.RandomSeed",
    "strategy_config": f"{_CONFIG}.StrategyConfig",
    "completion_criteria_config": f"{_CONFIG}.TuningJobCompletionCriteria",
    "warm_start_config": "WarmStartConfig",
    "tags": "Tags",
}
"""Setting of the SDK's tuner -> its path in the request."""
_KINDS = {"Integer": int, "Continuous": float}
# A range of so many whole numbers is tried as a whole.
_MOST_VALUES = 64
# Where in a continuous range a value is tried, beside its ends: no round number.
_INSIDE = (math.sqrt(5) - 1) / 2
# Combinations of values that are tried; with more, each value is tried with the first and the last of the others.
_MOST_TRIALS = 32


def tried_numbers(kind: str, low: Any, high: Any) -> list[Any]:
    """Values of a range that are tried: all of a small one of whole numbers, else its ends and some between."""
    if kind == "Integer":
        if high - low < _MOST_VALUES:
            return list(range(low, high + 1))
        return [low, low + 1, low + 2, low + round((high - low) * _INSIDE), high - 1, high]
    return [low, high, low + (high - low) * _INSIDE]


def trials(tried: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Trials of the values of each range. Without ranges there is one trial, of nothing."""
    # Every combination of a few values; of many, each range alone with the others at their ends.
    if math.prod(map(len, tried.values())) <= _MOST_TRIALS:
        yield from (dict(zip(tried, values, strict=True)) for values in itertools.product(*tried.values()))
        return
    for end in (0, -1):
        others = {name: values[end] for name, values in tried.items()}
        yield from ({**others, name: value} for name, values in tried.items() for value in values)


def defined_trials(ranges: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Trials of the ranges in a request, as texts of hyperparameters."""
    tried = {it["Name"]: list(it["Values"]) for it in ranges.get("CategoricalParameterRanges", ())}
    for kind, read in _KINDS.items():
        for it in ranges.get(f"{kind}ParameterRanges", ()):
            tried[it["Name"]] = list(map(str, tried_numbers(kind, read(it["MinValue"]), read(it["MaxValue"]))))
    yield from trials(tried)


def defined_setting_issues(request: Mapping[str, Any]) -> Iterator[Issue]:
    """Settings in the request of a tuning job that do not fit one another."""
    values = {name: found for name, path in SETTINGS.items() if (found := _at(request, path)) is not None}
    several = [it.get("HyperParameterRanges", {}) for it in request.get("TrainingJobDefinitions", ())]
    kinds: list[str] = []
    counts: list[int] = []
    for ranges in several or [request.get(_CONFIG, {}).get("ParameterRanges", {})]:
        kinds += [kind for kind in _KINDS for _ in ranges.get(f"{kind}ParameterRanges", ())]
        counts += [len(it["Values"]) for it in ranges.get("CategoricalParameterRanges", ())]
    yield from together_issues(values, kinds, counts)


def _at(request: Any, path: str) -> Any:
    for name in path.split("."):
        request = request.get(name) if isinstance(request, dict) else None
    return request


def together_issues(values: Mapping[str, Any], kinds: Sequence[str], counts: Sequence[int]) -> Iterator[Issue]:
    """Settings of which each is possible and that do not fit one another.

    ``kinds`` are those of the ranges of numbers, ``counts`` how many values each range of categories has.
    """
    most, together, strategy = values.get("max_jobs"), values.get("max_parallel_jobs"), values.get("strategy")
    if most is not None and together is not None and together > most:
        problem = f"must be at most max_jobs, which is {most}"
        yield Issue("tuner-parallel-jobs-too-many", "max_parallel_jobs", problem, together, f"Write {most} or fewer")
    if strategy == "Hyperband" and values.get("early_stopping_type") == "Auto":
        problem = "must be 'Off' with the strategy Hyperband, which stops trials itself"
        yield Issue("tuner-stops-twice", "early_stopping_type", problem, "Auto", "Leave it out")
    if strategy == "Grid":
        if kinds:
            problem = "needs a CategoricalParameter for every range: it tries every combination"
            remedy = "Write the values as CategoricalParameter([...]), or choose another strategy"
            yield Issue("tuner-grid-needs-categories", "strategy", problem, f"Grid with {kinds[0]}Parameter", remedy)
        elif most != (count := math.prod(counts)):
            # The service takes a Grid without it, but the SDK sends the None, which boto3 refuses.
            problem = f"must be the number of combinations of a Grid, {count}"
            yield Issue("tuner-grid-count", "max_jobs", problem, most, f"Set max_jobs={count}")
    elif strategy != "Hyperband" and "strategy_config" in values:
        problem = f"is for the strategy Hyperband, and the tuner's is {strategy}"
        yield Issue("tuner-strategy-config-unread", "strategy_config", problem, remedy="Leave it out")
