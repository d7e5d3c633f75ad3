"""Tuning jobs of the SageMaker SDK on our estimators: what a tuner would lose is refused, what it lacks is added.

``HyperparameterTuner`` asks an estimator for a few of its settings and drops the others, so the checks are made when
its ``fit`` is called. The SDK offers no hook there; ``fit`` of the class is wrapped once, and passes tuners of other
estimators through.
"""

from __future__ import annotations

import functools
import inspect
import re
import secrets
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.backends.sagemaker.request.request import BETTER, METRICS, normalised
from sm_llm.launcher.backends.sagemaker.sdk.sdk_checks import TRIAL_CHECKERS, TUNER_CHECKERS, TunerCall, TunerTrials
from sm_llm.launcher.backends.sagemaker.sdk.sdk_session import is_pipeline
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Mapping

# Names of a user's own metrics that are hardly to be maximised.
_SMALL_IS_GOOD = re.compile(r"loss|perplexity|ppl|error|(?:^|[^a-z])[cw]er(?:[^a-z]|$)", re.IGNORECASE)


def watch_tuners() -> None:
    """Make ``HyperparameterTuner.fit`` prepare tuners of our estimators."""
    from sagemaker.tuner import HyperparameterTuner

    original = HyperparameterTuner.fit
    # Every estimator calls this: a wrapper around a wrapper would prepare a tuner several times.
    if hasattr(original, "prepares_runs"):
        return

    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        if ours := _ours(self):
            # The SDK takes any further keyword, and passes it on to estimators of its built-in algorithms alone.
            dropped = {*given.arguments.get("kwargs", ()), *({"estimator_kwargs"} & set(given.arguments))}
            job_name = given.arguments.get("job_name")
            refuse(run(TUNER_CHECKERS, TunerCall(self, frozenset(dropped), job_name)))
            given.arguments["inputs"] = _prepared(self, given.arguments.get("inputs"))
            given.arguments["job_name"] = _job_name(self, ours[0], job_name)
        return original(*given.args, **given.kwargs)

    prepare = HyperparameterTuner._prepare_estimator_for_tuning

    def prepare_estimator(cls: Any, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Called by ``fit`` alone, in a pipeline when it is defined; ``TuningStep(tuner=…)`` does without."""
        with estimator.fitting() if hasattr(estimator, "run_uri") else nullcontext():
            prepare(estimator, *args, **kwargs)

    fit.prepares_runs = True  # type: ignore[attr-defined]
    HyperparameterTuner.fit = fit
    HyperparameterTuner._prepare_estimator_for_tuning = classmethod(prepare_estimator)


def _ours(tuner: Any) -> list[Any]:
    """The estimators of a tuner that are ours."""
    found = [tuner.estimator] if tuner.estimator is not None else tuner.estimator_dict.values()
    return [it for it in found if hasattr(it, "run_uri")]


def _prepared(tuner: Any, inputs: Any) -> Any:
    """The inputs of a tuner's ``fit`` with those of the jobs; the tuner gets what it lacks. Raises ``PlanError``."""
    if tuner.estimator is not None:
        merged = tuner.estimator.inputs_of(inputs)
        tuner.estimator = tuner.estimator.for_tuner(inputs)
        objective, ranges = tuner.objective_metric_name, tuner._hyperparameter_ranges or {}
        trials = TunerTrials(tuner.estimator, objective, tuner.objective_type, ranges, tuner.metric_definitions or [])
        tuner.metric_definitions = _checked(trials)
        tuner.estimator.show_start()
        return merged
    ours = {name: it for name, it in tuner.estimator_dict.items() if hasattr(it, "run_uri")}
    found = dict(inputs or {})
    for name, given in ours.items():
        own = given.inputs_of(found.get(name))
        tuner.estimator_dict[name] = estimator = given.for_tuner(found.get(name))
        ranges = tuner._hyperparameter_ranges_dict[name] or {}
        definitions = tuner.metric_definitions_dict.get(name) or []
        trials = TunerTrials(
            estimator, tuner.objective_metric_name_dict[name], tuner.objective_type, ranges, definitions
        )
        tuner.metric_definitions_dict[name] = _checked(trials)
        if own is not None:
            found[name] = own
        estimator.show_start()
    return found or None


def _job_name(tuner: Any, estimator: Any, given: Any) -> Any:
    """The name of the tuning job that ``fit`` starts, where none is ``given``: after the specification, and unique."""
    usual, base = _base_name(estimator), tuner.base_tuning_job_name
    if is_pipeline(estimator.sagemaker_session):
        if given is not None or base not in (None, usual):
            _warn("base_tuning_job_name and job_name: SageMaker Pipelines names the jobs of its steps itself")
        # The SDK would name it after the image.
        tuner.base_tuning_job_name = base or usual
        return given
    if given is not None:
        return given
    # The SDK adds the minute alone, and the service refuses a second job of one name.
    tail = f"-{datetime.now(UTC):%y%m%d-%H%M}-{secrets.token_hex(2)}"
    shown = normalised(base or usual)[: tuner.TUNING_JOB_NAME_MAX_LENGTH - len(tail)].rstrip("-")
    if base and shown != base:
        _warn(f"base_tuning_job_name: {base!r} cannot begin a name, or is too long: the name begins with {shown}")
    return f"{shown}{tail}"


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
    echo(f"  warning: {text}", err=True)


def _base_name(estimator: Any) -> str:
    spec = estimator.submission.job.spec
    return normalised(spec.backend.base_job_name or spec.name)
