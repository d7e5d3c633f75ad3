"""A workflow on SageMaker: ``launch`` stores and starts its pipeline, and the run follows the execution."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import EndpointConnectionError

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import SubmitError
from sm_llm.launcher.api import launch
from sm_llm.launcher.aws_account import account
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition
from sm_llm.launcher.find_runs import attach
from sm_llm.launcher.tools.shell import shell_command
from sm_llm.runs.run_record import Attempt, RunRecord
from sm_llm.runs.run_states import RunState
from tests.fixtures.sagemaker_double import Refusal
from tests.launcher.sagemaker.conftest import TINY

if TYPE_CHECKING:
    from tests.fixtures.s3_server import S3Server
    from tests.fixtures.sagemaker_double import SageMakerDouble

pytestmark = pytest.mark.integration


@pytest.fixture
def flow(bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("SM_LLM_ENDPOINT_URL", s3_server.endpoint)
    s3_server.client.put_object(Bucket=bucket, Key="text/a.txt", Body=b"text")
    prepare = {"kind": "prepare", "sources": [f"s3://{bucket}/text/"], "seq_length": 64}
    data = {"format": "rows", "train": "steps.prepare.output/train", "seq_length": 64}
    config = {"vocab_size": 32_000}
    return {
        "name": "flow",
        "backend": {**TINY["backend"], "max_run_seconds": 3600},
        "storage": f"s3://{bucket}/runs",
        "storage_options": {"endpoint_url": s3_server.endpoint},
        "compute": TINY["compute"],
        "steps": {
            "prepare": {"task": prepare, "compute": {"instance_type": "ml.m5.large"}},
            "train": {"task": {**TINY["task"], "data": data, "model": {"preset": "tiny", "config": config}}},
        },
    }


def begin_step(flow: dict[str, Any], double: SageMakerDouble, number: int) -> str:
    """What the service and the worker do when a step begins: a training job, and the record of the step's run."""
    step = definition(flow).steps[number]
    name = f"pipelines-abc-{step.name}-x"
    double.answer("CreateTrainingJob", {**step.arguments, "TrainingJobName": name})
    job = step.job
    attempt = Attempt(number=1, native_id=f"us-west-2/{name}", started=time.time())
    spec = job.spec.model_dump(mode="json")
    record = RunRecord(run_id=job.run_id, name=job.spec.name, created=time.time(), spec=spec, spec_digest="d")
    job_run_store(job).create(record.with_attempt(attempt))
    (execution,) = double.executions.values()
    execution["PipelineExecutionSteps"].append({"StepName": step.name, "StepStatus": "Executing"})
    return name


def test_a_workflow_is_stored_started_and_followed_to_its_end(
    flow: dict[str, Any], sagemaker_double: SageMakerDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    run = launch(flow)
    (execution,) = sagemaker_double.executions
    assert sagemaker_double.pipelines["flow"] == definition(flow).to_json()
    assert json.loads(run.run_store.store.get("requests/attempt-1.json") or b"") == definition(flow).to_json()
    reported = capsys.readouterr().err
    assert "started pipeline flow in us-west-2: prepare, train" in reported
    assert f"sm-llm logs -f {run.uri}" in reported
    assert (run.kind, run.steps, run.state) == ("workflow", {}, RunState.RUNNING)
    assert run.native_uri == f"sagemaker://{execution}"
    with pytest.raises(SubmitError, match="is running already"):
        launch(flow)

    name = begin_step(flow, sagemaker_double, 0)
    sagemaker_double.move(name, "Training")
    sagemaker_double.log(f"{name}/algo-1-1", "rows are made")
    assert run.describe() == (RunState.RUNNING, "step prepare")
    assert [(it, step.state) for it, step in run.steps.items()] == [("prepare", RunState.RUNNING)]
    assert list(run.logs()) == ["rows are made"]
    assert [step.uri for step in run.status().steps] == [definition(flow).steps[0].job.run_uri]

    sagemaker_double.executions[execution]["PipelineExecutionStatus"] = "Succeeded"
    assert run.state is RunState.COMPLETED
    assert run.attempts[-1].state is RunState.COMPLETED
    assert attach(execution, storage=flow["storage"]).uri == run.uri


def test_a_failed_step_is_the_reason_and_the_next_launch_continues(
    flow: dict[str, Any], sagemaker_double: SageMakerDouble
) -> None:
    run = launch(flow)
    (execution,) = sagemaker_double.executions.values()
    failed = {"StepName": "train", "StepStatus": "Failed", "FailureReason": "ClientError: no capacity"}
    execution.update(PipelineExecutionStatus="Failed", PipelineExecutionSteps=[failed])
    assert run.describe() == (RunState.FAILED, "step train: ClientError: no capacity")
    again = launch(flow)
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert again.state is RunState.RUNNING
    assert len(sagemaker_double.executions) == 2
    starts = [asked for operation, asked in sagemaker_double.requests if operation == "StartPipelineExecution"]
    assert [it.get("PipelineVersionId") for it in starts] == [None, 2], "what this launch stored, whoever stores next"


def test_a_start_whose_answer_was_lost_is_not_started_twice(
    flow: dict[str, Any], sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = account("us-west-2").client("sagemaker")
    start = client.start_pipeline_execution

    def unheard(**asked: Any) -> None:
        start(**asked)
        raise EndpointConnectionError(endpoint_url="https://sagemaker")

    with monkeypatch.context() as broken:
        broken.setattr(client, "start_pipeline_execution", unheard)
        with pytest.raises(SubmitError, match="was not started"):
            launch(flow)
    run = launch(flow)
    assert [it.native_id for it in run.attempts] == list(sagemaker_double.executions)


def test_a_stop_reaches_the_running_step_and_the_execution(
    flow: dict[str, Any], sagemaker_double: SageMakerDouble
) -> None:
    run = launch(flow)
    sagemaker_double.move(begin_step(flow, sagemaker_double, 0), "Training")
    assert run.stop() is RunState.RUNNING
    assert run.steps["prepare"].run_store.store.get("stop") == b"1\n"
    assert run.describe() == (RunState.RUNNING, "stopping")
    (execution,) = sagemaker_double.executions.values()
    execution["PipelineExecutionStatus"] = "Stopped"
    assert run.describe() == (RunState.STOPPED, "stopped on request")
    assert launch(flow).continued_attempt == 2
    assert run.steps["prepare"].run_store.store.get("stop") is None, "it would stop the step again"


def test_a_workflow_that_could_not_be_started_leaves_no_attempt(
    flow: dict[str, Any], sagemaker_double: SageMakerDouble
) -> None:
    sagemaker_double.refusals["StartPipelineExecution"] = Refusal("ResourceLimitExceeded", "too many")
    with pytest.raises(SubmitError, match="pipeline flow was not started"):
        launch(flow)
    del sagemaker_double.refusals["StartPipelineExecution"]
    assert [it.number for it in launch(flow).attempts] == [1]


def test_a_workflow_has_no_container_of_its_own(flow: dict[str, Any], sagemaker_double: SageMakerDouble) -> None:
    run = launch(flow)
    begin_step(flow, sagemaker_double, 0)
    with pytest.raises(SubmitError, match=f"Name the run of one: {run.steps['prepare'].uri}"):
        shell_command(run)


def test_a_dry_run_shows_what_the_steps_of_the_pipeline_are_sent(flow: dict[str, Any]) -> None:
    shown = launch(flow, dry_run=True)
    assert [it.request for it in shown] == [step["Arguments"] for step in definition(flow).to_json()["Steps"]]
