"""SageMaker Pipelines from workflows: render, create or update, start, watch, stop; by boto3, without the SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sm_llm.errors import Issue, PlanError, RunNotFound, SubmitError
from sm_llm.launcher.aws_account import AwsAccount, aws_errors, is_missing
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import PipelineDefinition, Register, render
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_values import VALUE_CHECKERS, GivenValues, job_in, spelt
from sm_llm.spec.validation.runner import refuse, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.planner import Source
    from sm_llm.spec.loading.overrides import Override

LONGEST_DEFINITION = 1 << 20
# Characters of a ClientRequestToken, by the service's model.
_SHORTEST_TOKEN = 32
_EXECUTION = re.compile(r"arn:[\w-]+:sagemaker:(?P<region>[\w-]+):\d*:pipeline/.+/execution/.+")


def definition(
    workflow: Source,
    *overrides: Override,
    variables: Mapping[str, str] | None = None,
    register: Register | None = None,
    cache_days: int | None = 30,
) -> PipelineDefinition:
    """The pipeline of a workflow, as a value; ``.to_json()`` is what the service gets.

    Args:
        variables: parameter's name -> the path it overrides: ``{"Rate": "steps.train.task.optim.learning_rate"}``.
        register: a step whose result becomes a version of a model.
        cache_days: how long a finished step stands in for an equal one; None runs every step every time, in a run of
            its own per execution.

    Raises ``SpecError`` and ``PlanError``.
    """
    from sm_llm.launcher.planner import load_whole
    from sm_llm.spec.job import WorkflowSpec

    spec = load_whole(workflow, overrides).spec
    if not isinstance(spec, WorkflowSpec):
        raise PlanError(
            [
                Issue(
                    "pipeline-needs-workflow",
                    "steps",
                    "a pipeline is made of a workflow",
                    remedy="Write the job as its only step",
                )
            ]
        )
    found = render(spec, variables, register, cache_days)
    # Refused here: the service would see it only after all files were uploaded.
    size = len(json.dumps(found.to_json()))
    if size > LONGEST_DEFINITION:
        raise PlanError(
            [
                Issue(
                    "pipeline-definition-too-large",
                    "steps",
                    f"the definition has {size:,} bytes; the service takes {LONGEST_DEFINITION:,}",
                )
            ]
        )
    return found


def upsert(
    workflow: Source,
    *overrides: Override,
    variables: Mapping[str, str] | None = None,
    register: Register | None = None,
    cache_days: int | None = 30,
    connect: Any = AwsAccount,
) -> str:
    """Store code and job files, and create or update the pipeline; returns its ARN. Raises ``SubmitError``, too."""
    found = definition(workflow, *overrides, variables=variables, register=register, cache_days=cache_days)
    return store(found, connect=connect).arn


class StoredPipeline(NamedTuple):
    """A pipeline as it was stored."""

    arn: str
    version: int | None
    """Which of the pipeline's definitions it is; None where the service does not return it, as for the first."""


def store(found: PipelineDefinition, *, connect: Any = AwsAccount) -> StoredPipeline:
    """``upsert`` for a definition that was rendered already."""
    store_files(found)
    client = connect(found.region).client("sagemaker")
    body = {"PipelineName": found.name, "PipelineDefinition": json.dumps(found.to_json()), "RoleArn": found.role}
    with aws_errors(f"pipeline {found.name} was not stored"):
        try:
            # Update before create: the service has no operation for both, and most pipelines exist.
            answer = client.update_pipeline(**body)
        except Exception as error:  # of botocore, which is loaded by now
            if not is_missing(error):
                raise
            answer = client.create_pipeline(ClientRequestToken=_token(f"sm-llm-{found.name}"), **body)
    return StoredPipeline(str(answer["PipelineArn"]), answer.get("PipelineVersionId"))


def store_files(found: PipelineDefinition) -> None:
    """Put what the steps read where they look for it; equal content lies there once."""
    from sm_llm.storage.uri import open_store

    for step in found.steps:
        for uri, body in step.uploads.items():
            folder, _, key = uri.rpartition("/")
            open_store(folder, step.job.spec.storage_options.model_dump()).put_if_absent(key, body)


def start(
    name: str,
    values: Mapping[str, Any] | None = None,
    *,
    region: str | None = None,
    version: int | None = None,
    token: str | None = None,
    connect: Any = AwsAccount,
) -> str:
    """Start an execution of a pipeline with values for its variables; returns the execution's ARN.

    ``version`` picks an earlier definition than the newest. The same ``token`` (letters, digits, hyphens) is answered
    with the same execution, so that a try whose answer was lost is not started twice.
    Raises ``SubmitError``, and ``PlanError`` for names that the pipeline does not have and values that its steps would
    refuse: the stored definition is read, and the job files of its steps.
    """
    given: Any = values
    if given is not None and not isinstance(given, Mapping):
        remedy = "Write {'Steps': 100}"
        message = "must be a mapping of variables to their values"
        raise PlanError([Issue("pipeline-values-invalid", "values", message, given, remedy)])
    client = connect(_region(region)).client("sagemaker")
    chosen: dict[str, Any] = {} if version is None else {"PipelineVersionId": version}
    # Without values only the defaults count, which were checked when the pipeline was defined.
    if values:
        _check_values(client, name, values, chosen)
    parameters = [{"Name": key, "Value": spelt(value)} for key, value in (values or {}).items()]
    with aws_errors(f"pipeline {name} was not started"):
        if token is not None:
            chosen["ClientRequestToken"] = _token(token)
        answer = client.start_pipeline_execution(PipelineName=name, PipelineParameters=parameters, **chosen)
    return str(answer["PipelineExecutionArn"])


def _check_values(client: Any, name: str, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    """Raise ``PlanError`` for values that the stored pipeline cannot take."""
    with aws_errors(f"pipeline {name} was not started: its definition cannot be read (sagemaker:DescribePipeline)"):
        text = client.describe_pipeline(PipelineName=name, **chosen)["PipelineDefinition"]
    refuse(run(VALUE_CHECKERS, GivenValues(json.loads(text), values, job_in)))


@dataclass(frozen=True)
class StepState:
    """One step of an execution: its state in the service's words, its training job's ARN, and whether it was cached."""

    name: str
    state: str
    job_arn: str | None = None
    cached_from: str | None = None
    reason: str | None = None


def status(execution: str, *, connect: Any = AwsAccount) -> tuple[str, list[StepState]]:
    """The state of an execution, and its steps' in the order they began. Raises ``SubmitError``."""
    client = connect(_region_of(execution)).client("sagemaker")
    with aws_errors(f"cannot describe {execution}"):
        # The state first: steps that end between the two requests are then newer than it, never older.
        state = client.describe_pipeline_execution(PipelineExecutionArn=execution)["PipelineExecutionStatus"]
        pages = client.get_paginator("list_pipeline_execution_steps").paginate(
            PipelineExecutionArn=execution, SortOrder="Ascending"
        )
        steps = [step for page in pages for step in page["PipelineExecutionSteps"]]
    return str(state), [
        StepState(
            it["StepName"],
            it["StepStatus"],
            it.get("Metadata", {}).get("TrainingJob", {}).get("Arn"),
            it.get("CacheHitResult", {}).get("SourcePipelineExecutionArn"),
            it.get("FailureReason"),
        )
        for it in steps
    ]


def logs(execution: str, step: str | None = None, *, connect: Any = AwsAccount) -> Iterator[str]:
    """What the training jobs of an execution printed, step by step; ``step`` picks one."""
    from sm_llm.launcher.find_runs import attach

    _, steps = status(execution, connect=connect)
    for it in steps:
        if it.job_arn is not None and step in (None, it.name):
            run = attach(f"sagemaker://{_region_of(execution)}/{it.job_arn.rpartition('/')[2]}")
            yield from (f"[{it.name}] {line}" for line in run.logs())


def stop(execution: str, *, connect: Any = AwsAccount) -> None:
    """Ask an execution to stop. Raises ``SubmitError``."""
    client = connect(_region_of(execution)).client("sagemaker")
    with aws_errors(f"cannot stop {execution}"):
        client.stop_pipeline_execution(PipelineExecutionArn=execution)


def _token(text: str) -> str:
    return text.ljust(_SHORTEST_TOKEN, "-")


def _region(region: str | None) -> str:
    import os

    from sm_llm.launcher.backends.sagemaker.request.settings import region_of

    found = region or region_of(os.environ)
    if found is None:
        raise SubmitError("no AWS region is given. Set AWS_REGION, or name one")
    return found


def _region_of(execution: str) -> str:
    match = _EXECUTION.fullmatch(execution)
    if match is None:
        raise RunNotFound(f"{execution}: is not the ARN of a pipeline's execution")
    return match["region"]
