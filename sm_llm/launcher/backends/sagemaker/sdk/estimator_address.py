"""The address of a run that is a step of a hand-written pipeline: it follows all that the step was given."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import RUN_HYPERPARAMETER
from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import is_address, known_values
from sm_llm.launcher.backends.sagemaker.pipelines.run_address import length_problem, part_problem
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DIGITS = 12
_PART = "is part of the address of the run"
_REMEDY = "Give the value to the specification, or use another default"


def step_address(base: str, given: Mapping[str, Any]) -> Any:
    """``base``, which follows the specification, and below it what was ``given`` beside it; text or an SDK ``Join``.

    ``given`` holds hyperparameters, environment and inputs by name. What is known now counts as a digest, what only
    an execution knows (parameters, properties of earlier steps) as its value. Nothing given leaves ``base``.
    """
    if not any(given.values()):
        return base
    shape = json.dumps(_shape(given), sort_keys=True, default=str)
    fixed = f"{base}/{hashlib.sha256(shape.encode()).hexdigest()[:_DIGITS]}"
    variables = {json.dumps(it.expr, sort_keys=True): it for it in _variables(given)}
    if not variables:
        return fixed
    from sagemaker.workflow.functions import Join

    return Join(on="/", values=[fixed, *variables.values()])


def address_issues(base: str, given: Mapping[str, Any]) -> Iterator[Issue]:
    """Variables whose default or other choice makes no address: it is a tag of the job, whose characters and length
    are limited."""
    known = []
    for it in _variables(given):
        # Numbers and truth values are written without characters that a tag cannot hold.
        texts = [text for text in known_values(it).every if not isinstance(text, bool | int | float)]
        name = getattr(it, "name", "a variable")
        for text in texts:
            if (problem := part_problem(text)) is not None:
                yield Issue("variable-not-an-address", f"variable {name}", f"{_PART}, and {problem}", text, _REMEDY)
        known.append(max(texts, key=len, default=""))
    whole = "/".join([base, "0" * _DIGITS, *known])
    if (problem := length_problem(whole)) is not None:
        yield Issue("run-address-too-long", "variables", f"{_PART}, {problem}", remedy=_REMEDY)


def result_issues(address: Any) -> Iterator[Issue]:
    """An address whose variables are addresses: the run lies without their double slash, and a channel would not."""
    for part in () if isinstance(address, str) else address.values:
        default = getattr(part, "default_value", None)
        if (isinstance(default, str) and "//" in default) or is_address(getattr(part, "expr", None)):
            problem = "holds a variable that is an address itself, which S3 would take literally"
            remedy = "Give the next step step.properties.ModelArtifacts.S3ModelArtifacts"
            yield Issue(
                "result-address-nested", "estimator.result_uri", problem, getattr(part, "expr", default), remedy
            )
            return


def address_below(address: Any, name: str) -> Any:
    """The address of ``name`` below a ``step_address``; text or an SDK ``Join``."""
    if isinstance(address, str):
        return f"{address}/{name}"
    from sagemaker.workflow.functions import Join

    return Join(on="/", values=[address, name])


def step_of(estimator: Any, base: str, given: Mapping[str, Any]) -> Any:
    """A copy of an estimator for one step: the SDK uses it when the pipeline is defined, maybe after another ``fit``.

    Its run lies at ``step_address``, so that another value trains anew.
    """
    step = copy.copy(estimator)
    step._address = step_address(base, given)
    # The SDK changes this mapping in place, and a copy of an object shares it.
    step._hyperparameters = dict(estimator._hyperparameters)
    if step._address != base:
        step._hyperparameters[RUN_HYPERPARAMETER] = step._address
        step.tags = [it if it["Key"] != RUN_TAG else {**it, "Value": step._address} for it in estimator.tags]
    return step


def _shape(value: Any) -> Any:
    if hasattr(value, "expr"):
        return {"expr": value.expr}
    if isinstance(value, dict):
        return {str(key): _shape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(item) for item in value]
    return _shape(value.config) if hasattr(value, "config") else value


def _variables(value: Any) -> Iterator[Any]:
    """Every variable in a value, in the order of names."""
    if hasattr(value, "expr"):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _variables(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _variables(item)
    elif hasattr(value, "config"):  # TrainingInput and FileSystemInput
        yield from _variables(value.config)
