"""Workflows on SageMaker: a workflow's run is an execution of its pipeline, which places the runs of the steps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import StorageError, SubmitError
from sm_llm.launcher.attempt_outcome import record_outcome
from sm_llm.launcher.backend import NativeState, Submission
from sm_llm.launcher.backends.sagemaker.jobs.jobs import leaving_alone
from sm_llm.launcher.backends.sagemaker.jobs.submit import check_role, keep_request
from sm_llm.launcher.backends.sagemaker.pipelines import pipeline_operations as pipelines
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_definition import PipelineDefinition, render
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG
from sm_llm.launcher.build_submission import recorded_workflow
from sm_llm.launcher.run_handle import RunHandle
from sm_llm.runs.outcome import Outcome
from sm_llm.runs.run_paths import STEPS, STOP_FILE
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import run_store_at
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.launcher.aws_account import AwsAccount
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec

    Connect = Callable[[str], AwsAccount]

_ENDS = {"Succeeded": RunState.COMPLETED, "Failed": RunState.FAILED, "Stopped": RunState.STOPPED}


def is_execution(native_id: str) -> bool:
    """Whether a native id is that of a workflow: the ARN of a pipeline's execution."""
    return native_id.startswith("arn:")


def submissions(workflow: WorkflowSpec, plans: Sequence[Plan]) -> list[Submission]:
    """What the steps of a workflow's pipeline are sent, one Submission per step. Touches nothing."""
    steps = render(workflow, plans=plans).steps
    return [Submission("sagemaker", it.job, it.arguments, it.uploads) for it in steps]


def start(run_store: RunStore, attempt: int, connect: Connect) -> str:
    """Store the pipeline of the workflow recorded in ``run_store`` and start it; returns the execution's ARN.

    Raises ``SubmitError``; then nothing runs.
    """
    record = run_store.record()
    found = render(recorded_workflow(run_store, record))
    check_role(connect(found.region), found.role)
    stored = pipelines.store(found, connect=connect)
    for step in found.steps:  # a step that continues is the same attempt, for which an old request would count
        job_run_store(step.job).store.delete([STOP_FILE])
    keep_request(run_store, attempt, found.to_json())
    # Another launch may store a pipeline of the same name meanwhile; this one starts its own.
    token = f"{record.run_id}-{attempt}"
    execution = pipelines.start(found.name, region=found.region, version=stored.version, token=token, connect=connect)
    echo(*_started_lines(found, run_store.uri, execution), err=True)
    return execution


def _started_lines(found: PipelineDefinition, uri: str, execution: str) -> list[str]:
    names = ", ".join(step.name for step in found.steps)
    return [
        f"started pipeline {found.name} in {found.region}: {names}",
        f"execution {execution}",
        f"follow it with: sm-llm logs -f {quoted(uri)}",
    ]


def step_run_store(run_store: RunStore, step: str) -> RunStore:
    """Where a step of the newest attempt has its run: what the pipeline's definition holds, which equal steps share."""
    record = run_store.record()
    kept = record.attempts[-1].request if record.attempts else None
    if kept is None:
        return run_store.below(STEPS, step)
    try:
        definition = json.loads(run_store.store.get(kept) or b"{}")
        found = [it for it in definition.get("Steps", []) if it["Name"] == step]
        tags = {tag["Key"]: tag["Value"] for it in found for tag in it["Arguments"]["Tags"]}
        uri = tags[RUN_TAG] if found else None
    # The definition comes from storage, so any part of it may be missing or of another type.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{run_store.uri}/{kept}: cannot be used ({type(error).__name__}: {error})") from error
    # Reached as the workflow is: neither its record nor a definition in its storage chooses where requests go.
    return run_store.below(STEPS, step) if uri is None else run_store_at(uri, run_store.options)


def state_of(run_store: RunStore, record: RunRecord, connect: Connect) -> NativeState:
    """The state of the newest attempt in a workflow's ``record``. An execution that has ended is settled there."""
    last = record.attempts[-1]
    with leaving_alone(run_store):
        reported, steps = pipelines.status(last.native_id, connect=connect)
    if (state := _ENDS.get(reported)) is None:
        going = ", ".join(it.name for it in steps if it.state in ("Starting", "Executing"))
        return NativeState(RunState.RUNNING, "stopping" if reported == "Stopping" else f"step {going}" if going else "")
    runs = (step_run_store(run_store, name) for name in record.spec["steps"])
    return NativeState.of(record_outcome(run_store, last, Outcome(state, _reason(reported, steps)), steps=runs))


def _reason(reported: str, steps: list[pipelines.StepState]) -> str | None:
    failed = [f"step {it.name}: {it.reason or 'no reason was given'}" for it in steps if it.state == "Failed"]
    return "; ".join(failed) or {"Stopped": "stopped on request", "Failed": "no reason was given"}.get(reported)


def stop(run_store: RunStore, execution: str, *, now: bool, connect: Connect) -> None:
    """Ask the running steps' processes to stop through their storage (``now`` leaves it out), then the execution."""
    for step in () if now else RunHandle(run_store).steps.values():
        if not step.state.is_final:
            step.run_store.request_stop(step.attempts[-1].number)
    with leaving_alone(run_store):
        pipelines.stop(execution, connect=connect)


def assert_job(run_store: RunStore, native_id: str, what: str) -> None:
    """Raise ``SubmitError`` where only a job has what is asked for."""
    if is_execution(native_id):
        known = ", ".join(step.uri for step in RunHandle(run_store).steps.values()) or "none has begun"
        raise SubmitError(f"{run_store.uri}: a workflow has {what} only in its steps. Name the run of one: {known}")
