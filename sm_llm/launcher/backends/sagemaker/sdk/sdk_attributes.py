"""Attributes of an estimator that are set after it was built: they would reach the request without any check.

``attributes`` describes an estimator; ``changed_issues`` compares it with an earlier description. A new attribute
counts as a change too, for a mistyped name has no effect.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.sdk.sdk_effects import EFFECTS
from sm_llm.spec.validation.fields import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# What the SDK itself changes between two jobs; no request follows from it.
_OF_THE_SDK = (
    "_compiled_models", "_current_job_name", "deploy_instance_type", "jobs", "latest_training_job", "tensorboard_app",
    "uploaded_code",
)  # fmt: skip
OF_RUNS = (
    "_address", "_arguments", "_built", "_first", "_fitted", "_given", "_is_fitting", "_more_tags", "_source",
    "_staged",
)  # fmt: skip
"""What our own class keeps."""


def attributes(estimator: Any) -> dict[str, Any]:
    """Attributes by name, in a form that later changes, also inside lists and mappings, do not reach."""
    left_out = {*_OF_THE_SDK, *OF_RUNS}
    return {name: _fixed(value) for name, value in vars(estimator).items() if name not in left_out}


def changed_issues(estimator: Any, built: Mapping[str, Any]) -> Iterator[Issue]:
    """An issue for every attribute that differs from ``built``, an earlier result of ``attributes``."""
    now = attributes(estimator)
    for name in sorted({*built, *now}):
        if name in built and name in now and built[name] == now[name]:
            continue
        argument = name.lstrip("_")
        effect = EFFECTS.get(argument)
        if name not in built:
            problem, remedy = "is not an attribute of the estimator and has no effect", did_you_mean(name, list(built))
        else:
            problem, remedy = "was changed after the estimator was built, where nothing checks it", ""
        if argument == "hyperparameters":
            remedy = "Use set_hyperparameters()"
        elif effect is not None and effect.kind == "refused":
            remedy = effect.target
        elif effect is not None:
            remedy = f"Give it as an argument: sm_llm.estimator(spec, {argument}=...)"
        yield Issue(
            "estimator-attribute-changed", argument, problem, now.get(name), remedy or "Build another estimator"
        )


def _fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fixed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fixed(item) for item in value]
    if isinstance(value, set):
        return set(value)
    # A pipeline variable is compared by its expression.
    if hasattr(value, "expr"):
        return json.dumps(value.expr, sort_keys=True, default=str)
    return _fixed(value._to_request_dict()) if hasattr(value, "_to_request_dict") else value
