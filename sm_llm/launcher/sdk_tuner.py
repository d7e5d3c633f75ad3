"""Tuning jobs of the SageMaker SDK on our estimators: what a tuner would lose is refused, what it lacks is added.

``HyperparameterTuner`` asks an estimator for a few of its settings and drops the others, so the checks are made when
its ``fit`` is called. The SDK offers no hook there; ``fit`` of the class is wrapped once, and passes tuners of other
estimators through.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import applied
from sm_llm.errors import Fault, PlanError, SpecError
from sm_llm.launcher.sagemaker.names import normalised
from sm_llm.spec.faults import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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

    @functools.wraps(original)
    def fit(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(self, _prepared(self, inputs), *args, **kwargs)

    fit.prepares_runs = True  # type: ignore[attr-defined]
    HyperparameterTuner.fit = fit


def _prepared(tuner: Any, inputs: Any) -> Any:
    """The inputs of a tuner's ``fit`` with those of the jobs; the tuner gets what it lacks.

    Raises ``PlanError`` for what a tuning job cannot do.
    """
    if tuner.estimator is not None:
        if not hasattr(tuner.estimator, "run_uri"):
            return inputs
        _refuse(_faults(tuner.estimator, tuner.objective_metric_name, tuner._hyperparameter_ranges))
        tuner.metric_definitions = _definitions(tuner.estimator, tuner.metric_definitions)
        _refuse(_objective_faults(tuner.objective_metric_name, tuner.metric_definitions))
        tuner.base_tuning_job_name = tuner.base_tuning_job_name or _base_name(tuner.estimator)
        return tuner.estimator.inputs_of(inputs)
    ours = {name: it for name, it in tuner.estimator_dict.items() if hasattr(it, "run_uri")}
    found = dict(inputs or {})
    for name, estimator in ours.items():
        objective = tuner.objective_metric_name_dict[name]
        _refuse(_faults(estimator, objective, tuner._hyperparameter_ranges_dict[name]))
        tuner.metric_definitions_dict[name] = _definitions(estimator, tuner.metric_definitions_dict.get(name))
        _refuse(_objective_faults(objective, tuner.metric_definitions_dict[name]))
        tuner.base_tuning_job_name = tuner.base_tuning_job_name or _base_name(estimator)
        if (own := estimator.inputs_of(found.get(name))) is not None:
            found[name] = own
    return found or None


def _refuse(faults: Iterator[Fault]) -> None:
    if found := list(faults):
        raise PlanError(found)


def _faults(estimator: Any, objective: Any, ranges: Mapping[Any, Any] | None) -> Iterator[Fault]:
    for attribute, (path, lacks) in _LOST.items():
        if getattr(estimator, attribute, None):
            remedy = "Leave it out, or launch the trials as jobs of their own"
            yield Fault(path, f"has no effect: a tuning job {lacks}", remedy=remedy)
    if hasattr(objective, "expr"):
        yield Fault("objective_metric_name", "must be text, not a pipeline variable", remedy="Write the name itself")
    for name, value in (ranges or {}).items():
        yield from _range_faults(estimator, name, value)


def _range_faults(estimator: Any, name: Any, value: Any) -> Iterator[Fault]:
    """Values of a range that the worker of a trial would refuse, and pipeline variables, which nobody can check."""
    if not isinstance(name, str):
        problem = "a name must be text, not a pipeline variable"
        yield Fault("hyperparameter_ranges", problem, getattr(name, "expr", name), "Write the name itself")
        return
    path = f"hyperparameter_ranges.{name}"
    values = value.values if hasattr(value, "values") else [value.min_value, value.max_value]
    if any(hasattr(it, "expr") for it in [*values, getattr(value, "scaling_type", None)]):
        remedy = "Write numbers or text; hyperparameters of the estimator take pipeline variables"
        yield Fault(
            path, "must hold values, not pipeline variables: trials are checked before they start", None, remedy
        )
        return
    for one in values:
        text = json.dumps(one) if hasattr(value, "values") else str(one)
        try:
            applied(estimator.submission.job, {name: text})
        except SpecError as error:
            fault = error.faults[0]
            yield Fault(path, fault.problem, one, fault.remedy)
            return


def _definitions(estimator: Any, given: list[dict[str, str]] | None) -> list[dict[str, str]]:
    """The estimator's metric definitions with those that were given to the tuner, which win."""
    own = {it["Name"]: it for it in estimator.metric_definitions or []}
    return list({**own, **{it["Name"]: it for it in given or []}}.values())


def _objective_faults(objective: Any, definitions: list[dict[str, str]]) -> Iterator[Fault]:
    names = [it["Name"] for it in definitions]
    if objective is None or objective in names:
        return
    listed = f"Known: {', '.join(names)}" if names else "Set backend.metric_definitions=true"
    remedy = f"{did_you_mean(objective, names)} {listed}".strip()
    yield Fault(
        "objective_metric_name", "no metric definition has this name, so no trial would report it", objective, remedy
    )


def _base_name(estimator: Any) -> str:
    spec = estimator.submission.job.spec
    return normalised(spec.backend.base_job_name or spec.name)
