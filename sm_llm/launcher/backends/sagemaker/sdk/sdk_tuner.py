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

from sm_llm.launcher.backends.sagemaker.request.request import BETTER, METRICS, normalised
from sm_llm.launcher.backends.sagemaker.sdk.sdk_checks import TRIAL_CHECKERS, TUNER_CHECKERS, TunerCall, TunerTrials
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Names of a user's own metrics that are hardly to be maximised.
_SMALL_IS_GOOD = re.compile(r"loss|perplexity|ppl|error|(?:^|[^a-z])[cw]er(?:[^a-z]|$)", re.IGNORECASE)


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
        refuse(run(TUNER_CHECKERS, TunerCall(tuner, frozenset(dropped))))
        tuner.estimator = tuner.estimator.for_tuner()
        objective, ranges = tuner.objective_metric_name, tuner._hyperparameter_ranges or {}
        trials = TunerTrials(tuner.estimator, objective, tuner.objective_type, ranges, tuner.metric_definitions or [])
        tuner.metric_definitions = _checked(trials)
        # The SDK would name the tuning job after the image.
        tuner.base_tuning_job_name = tuner.base_tuning_job_name or _base_name(tuner.estimator)
        return tuner.estimator.inputs_of(inputs)
    ours = {name: it for name, it in tuner.estimator_dict.items() if hasattr(it, "run_uri")}
    found = dict(inputs or {})
    if ours:
        refuse(run(TUNER_CHECKERS, TunerCall(tuner, frozenset(dropped))))
    for name, given in ours.items():
        tuner.estimator_dict[name] = estimator = given.for_tuner()
        ranges = tuner._hyperparameter_ranges_dict[name] or {}
        definitions = tuner.metric_definitions_dict.get(name) or []
        trials = TunerTrials(
            estimator, tuner.objective_metric_name_dict[name], tuner.objective_type, ranges, definitions
        )
        tuner.metric_definitions_dict[name] = _checked(trials)
        tuner.base_tuning_job_name = tuner.base_tuning_job_name or _base_name(estimator)
        if (own := estimator.inputs_of(found.get(name))) is not None:
            found[name] = own
    return found or None


def _checked(trials: TunerTrials) -> list[Mapping[str, str]]:
    """The tuner's metric definitions and the estimator's. Raises ``PlanError`` with all issues of trials."""
    refuse(run(TRIAL_CHECKERS, trials))
    given = {it["Name"]: it for it in trials.definitions}
    for name in sorted(set(METRICS) & set(given)):
        if given[name] != trials.own_definitions.get(name, given[name]):
            _warn(f"metric_definitions: {given[name]['Regex']!r} replaces the rule of sm_llm for {name}")
    objective = trials.objective
    if trials.direction == "Maximize" and objective not in BETTER and _SMALL_IS_GOOD.search(objective):
        _warn(f"objective_type: the tuning job maximises {objective}; objective_type='Minimize' minimises it")
    return list(trials.all_definitions.values())


def _warn(text: str) -> None:
    say(f"  warning: {text}", err=True)


def _base_name(estimator: Any) -> str:
    spec = estimator.submission.job.spec
    return normalised(spec.backend.base_job_name or spec.name)
