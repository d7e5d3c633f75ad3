"""Hand-written pipelines of the SageMaker SDK: two steps that would publish at one address are refused.

The second would find the result of the first and do nothing. A step's name is known only once the pipeline is defined,
so the check is made there: the SDK offers no hook, and ``definition`` of the class is wrapped once.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_values import (
    VALUE_CHECKERS,
    GivenValues,
    job_in,
    training_steps,
)
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.storage.s3.s3_client import as_session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.spec.validation.runner import Checker


def watch_pipelines() -> None:
    """Make ``Pipeline.definition`` compare the addresses of our runs, and ``start`` check values of variables."""
    from sagemaker.workflow.pipeline import Pipeline

    original = Pipeline.definition
    if hasattr(original, "compares_runs"):
        return

    @functools.wraps(original)
    def definition(self: Any) -> str:
        text: str = original(self)
        refuse(run(WRITTEN_PIPELINE_CHECKERS, json.loads(text)))
        return text

    begin = Pipeline.start

    @functools.wraps(begin)
    def start(self: Any, parameters: Any = None, *args: Any, **kwargs: Any) -> Any:
        _check_start(self, parameters)
        return begin(self, parameters, *args, **kwargs)

    definition.compares_runs = True  # type: ignore[attr-defined]
    Pipeline.definition = definition
    Pipeline.start = start


def _check_start(pipeline: Any, values: Any) -> None:
    """Raise ``PlanError`` for values that a step of ours cannot take; pipelines of others are left alone."""
    if not isinstance(values, dict) or not values or not hasattr(pipeline.sagemaker_session, "boto_session"):
        return
    found = json.loads(pipeline.definition())
    tags = (tag for step in training_steps(found["Steps"]) for tag in step["Arguments"].get("Tags", ()))
    if any(tag["Key"] == RUN_TAG for tag in tags):
        with as_session(pipeline.sagemaker_session.boto_session._session):
            refuse(run(VALUE_CHECKERS, GivenValues(found, values, job_in)))


def check_step_addresses(definition: Mapping[str, Any]) -> Iterator[Issue]:
    """An issue for every step whose run lies where that of an earlier step does."""
    first: dict[str, str] = {}
    for step in training_steps(definition["Steps"]):
        for tag in step["Arguments"].get("Tags", ()):
            if tag["Key"] != RUN_TAG:
                continue
            name, address = step["Name"], json.dumps(tag["Value"])
            other = first.setdefault(address, name)
            if other != name:
                problem = f"its run would lie where that of {other} does: specification, arguments and inputs are equal"
                remedy = f"Name one of them differently: sm_llm.estimator(spec, 'name={name.lower()}', ...)"
                yield Issue("step-address-shared", f"steps.{name}", problem, tag["Value"], remedy)


WRITTEN_PIPELINE_CHECKERS: tuple[Checker[Mapping[str, Any]], ...] = (check_step_addresses,)
