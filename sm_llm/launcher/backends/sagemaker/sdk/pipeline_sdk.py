"""A pipeline's definition as objects of the SageMaker SDK 2, for who builds on them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import EXECUTION
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition, store_files
from sm_llm.launcher.backends.sagemaker.sdk.estimators import of_session, pytorch, without_telemetry
from sm_llm.launcher.backends.sagemaker.sdk.sdk_arguments import arguments, channels, job_channel
from sm_llm.launcher.backends.sagemaker.sdk.sdk_checks import PIPELINE_SESSION_CHECKERS, PipelineSessionCall
from sm_llm.launcher.backends.sagemaker.sdk.sdk_session import defaults_of
from sm_llm.spec.validation.runner import refuse, run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import (
        PipelineDefinition,
        PipelineStep,
        Register,
    )
    from sm_llm.launcher.planner import Source
    from sm_llm.spec.loading.overrides import Override

_GET = "Parameters."


def build_pipeline(
    workflow: Source,
    *overrides: Override,
    variables: Mapping[str, str] | None = None,
    register: Register | None = None,
    cache_days: int | None = 30,
    sagemaker_session: Any = None,
) -> Any:
    """The same pipeline as a ``sagemaker.workflow.pipeline.Pipeline``; its definition equals ``definition``'s.

    What the steps read is stored in S3 first. Raises ``SubmitError`` without version 2 of the SDK, and ``PlanError``
    for a session that is no ``PipelineSession`` or of another region.
    """
    pytorch()  # nothing is stored for an SDK that is not there
    with defaults_of(sagemaker_session):
        found = definition(workflow, *overrides, variables=variables, register=register, cache_days=cache_days)
    refuse(run(PIPELINE_SESSION_CHECKERS, PipelineSessionCall(sagemaker_session, found.region)))
    with stored_with(sagemaker_session):
        store_files(found)
    return pipeline_of(found, sagemaker_session)


def pipeline_of(found: PipelineDefinition, session: Any = None) -> Any:
    """A ``Pipeline`` whose definition equals ``found.to_json()``."""
    kind = pytorch()
    from sagemaker.workflow import parameters
    from sagemaker.workflow.pipeline import Pipeline
    from sagemaker.workflow.pipeline_context import PipelineSession

    session = without_telemetry(session or PipelineSession(_boto_session(found.region)))
    classes = {
        bool: parameters.ParameterBoolean,
        int: parameters.ParameterInteger,
        float: parameters.ParameterFloat,
        str: parameters.ParameterString,
    }
    own = {it.name: classes[type(it.default)](it.name, default_value=it.default) for it in found.variables}
    steps = [_training(step, kind, session, own, found.cache_days) for step in found.steps]
    return Pipeline(found.name, parameters=list(own.values()), steps=steps, sagemaker_session=session)


def stored_with(session: Any) -> AbstractContextManager[None]:
    """Inside, S3 is reached with the credentials of the session that was given, if one was."""
    return nullcontext() if session is None else of_session(session)


def _boto_session(region: str) -> Any:
    import boto3

    return boto3.session.Session(region_name=region)


def _training(step: PipelineStep, kind: Any, session: Any, own: Mapping[str, Any], cache_days: int | None) -> Any:
    from sagemaker.workflow.steps import CacheConfig, TrainingStep

    # The arguments are made of plain texts; expressions, which are no JSON, are put in after that.
    request = {**step.arguments, "HyperParameters": _texts(step.arguments["HyperParameters"])}
    given = arguments({**request, "Tags": _objects(request["Tags"], own)})
    given["hyperparameters"] = given["hyperparameters"] | {
        key: _objects(_bare(text), own)
        for key, text in step.arguments["HyperParameters"].items()
        if not isinstance(text, str)
    }
    estimator = kind(sagemaker_session=session, **given)
    estimator.code_channel_name, estimator.code_uri = job_channel(request)
    # With a PipelineSession fit starts nothing and returns the arguments of the step.
    return TrainingStep(
        step.name,
        step_args=estimator.fit(channels(request) or None),
        cache_config=None if cache_days is None else CacheConfig(enable_caching=True, expire_after=f"P{cache_days}D"),
        depends_on=list(step.after) or None,
    )


def _bare(text: Mapping[str, Any]) -> Any:
    """Of a text made of one expression the SDK wants the expression, and makes the text itself."""
    join = text.get("Std:Join", {})
    return join["Values"][0] if join.get("On") == "" and len(join["Values"]) == 1 else text


def _texts(hyperparameters: Mapping[str, Any]) -> dict[str, str]:
    return {key: text for key, text in hyperparameters.items() if isinstance(text, str)}


def _objects(value: Any, own: Mapping[str, Any]) -> Any:
    """A JSON value with its expressions as objects of the SDK."""
    from sagemaker.workflow.execution_variables import ExecutionVariables
    from sagemaker.workflow.functions import Join

    if isinstance(value, list):
        return [_objects(item, own) for item in value]
    if not isinstance(value, dict):
        return value
    if value == EXECUTION:
        return ExecutionVariables.PIPELINE_EXECUTION_ID
    if set(value) == {"Get"}:
        return own[value["Get"].removeprefix(_GET)]
    if set(value) == {"Std:Join"}:
        inner = value["Std:Join"]
        return Join(on=inner["On"], values=_objects(inner["Values"], own))
    return {key: _objects(item, own) for key, item in value.items()}
