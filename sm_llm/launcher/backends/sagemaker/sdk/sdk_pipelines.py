"""Hand-written pipelines of the SageMaker SDK: steps that publish at one address, or read too early, are refused.

Of two steps with one address the second would find the result of the first and do nothing. A step's name is known only
once the pipeline is defined, so the checks are made there: the SDK offers no hook, and ``definition`` of the class is
wrapped once.
"""

from __future__ import annotations

import functools
import json
import re
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
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.spec.validation.runner import Checker

_PROPERTY = re.compile(r'"Get": "Steps\.([^."\[]+)')
"""A property of another step, as definitions name it."""


def watch_pipelines() -> None:
    """Make ``Pipeline.definition`` compare the addresses of our runs, and ``start`` check values of variables."""
    from sagemaker.workflow.pipeline import Pipeline

    original = Pipeline.definition
    # Every estimator calls this: wrapping a wrapper would check a definition several times.
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
    # The pipeline in hand, not the stored one: it may have changed since, and upsert is the caller's.
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
            # An address may hold variables of the pipeline: equal JSON is an equal address in every execution.
            other = first.setdefault(address, name)
            if other != name:
                problem = f"its run would lie where that of {other} does: specification, arguments and inputs are equal"
                remedy = f"Name one of them differently: sm_llm.estimator(spec, 'name={name.lower()}', ...)"
                yield Issue("step-address-shared", f"steps.{name}", problem, tag["Value"], remedy)


def check_step_order(definition: Mapping[str, Any]) -> Iterator[Issue]:
    """An issue for every step that reads below the run of another step and does not wait for it.

    The SDK derives the order from properties of steps, and an address is plain text to it. Both steps would start at
    once, and the reader finds nothing, or what the execution before has left. Branches of conditions are left alone:
    what they wait for is the condition's.
    """
    steps = definition["Steps"]
    runs = {
        step["Name"]: tag["Value"]
        for step in steps
        for tag in step.get("Arguments", {}).get("Tags", ())
        if step.get("Type") == "Training" and tag["Key"] == RUN_TAG
    }
    for step in steps:
        for channel in step.get("Arguments", {}).get("InputDataConfig", ()):
            location = channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
            for other, run_address in runs.items():
                if other == step["Name"] or not _is_below(location, run_address):
                    continue
                if other not in _waits_for(step["Name"], steps):
                    problem = f"reads what {other} publishes, and does not wait for it"
                    remedy = f"Write TrainingStep(..., depends_on=[{other!r}])"
                    where = f"steps.{step['Name']}.{channel['ChannelName']}"
                    yield Issue("step-order-missing", where, problem, location, remedy)


def _is_below(location: Any, folder: Any) -> bool:
    """Whether an address, a text or a join of parts, begins with ``folder``."""
    if isinstance(location, str) and isinstance(folder, str):
        return f"{location}/".startswith(f"{folder}/")
    # A join of variables and texts is JSON in both: what begins with the folder's join contains it.
    return not isinstance(folder, str) and json.dumps(folder) in json.dumps(location)


def _waits_for(name: str, steps: Sequence[Mapping[str, Any]]) -> set[str]:
    """The steps that end before this one starts: those it names, those whose properties it reads, and theirs."""
    after = {
        step["Name"]: {*step.get("DependsOn", ()), *_PROPERTY.findall(json.dumps(step.get("Arguments", {})))}
        for step in steps
    }
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = after.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


WRITTEN_PIPELINE_CHECKERS: tuple[Checker[Mapping[str, Any]], ...] = (check_step_addresses, check_step_order)
