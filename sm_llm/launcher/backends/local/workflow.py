"""Runs the steps of a workflow in turn on this machine; each step is a run of its own below ``steps/``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import SmLlmError
from sm_llm.launcher.backends.local.attempt import recorded, run_attempt
from sm_llm.launcher.backends.local.local_run import write_submission
from sm_llm.launcher.backends.workflow_steps import next_submission
from sm_llm.launcher.job_inputs import absolute_inputs
from sm_llm.launcher.planning.plan import assert_supported
from sm_llm.runs.outcome import Outcome
from sm_llm.runs.results import link_result, result_location
from sm_llm.runs.run_paths import STEPS, step_run_id
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job import WorkflowSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.backends.local.attempt import Recording
    from sm_llm.launcher.backends.local.processes import Interrupts
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore


def run_workflow(
    run_store: RunStore,
    interrupts: Interrupts,
    on_started: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> Outcome:
    """Run every step that has no published result yet, in order; the first that does not complete ends the workflow.

    ``folder`` is what relative inputs are relative to, by default the working directory.
    """
    record = run_store.record()
    workflow = record.load_spec()
    assert isinstance(workflow, WorkflowSpec)
    with recorded(run_store, _attempt(record), on_started) as recording:
        interrupts.heed(run_store.paths.stop_file)  # another machine asks by it; a job's own workers look for it
        outcome = _run_steps(run_store, record, workflow, interrupts, recording, folder or Path.cwd())
        recording.end(outcome)
    return outcome


def _attempt(record: RunRecord) -> int:
    """The attempt that the launcher has claimed already, as it does in S3, or else the next."""
    last = record.attempts[-1] if record.attempts else None
    return last.number if last is not None and last.is_claim else record.next_attempt


def _run_steps(
    run_store: RunStore, record: RunRecord, workflow: WorkflowSpec, interrupts: Interrupts, recording: Recording,
    folder: Path,
) -> Outcome:  # fmt: skip
    outputs: dict[str, str] = {}
    result = None
    for step in workflow.steps:
        step_store, own_id = run_store.below(STEPS, step), step_run_id(record.run_id, step)
        result = result_location(step_store, own_id) if step_store.exists() else None
        if result is None:
            outcome = _run_step(step_store, record, workflow, step, outputs, interrupts, recording, folder)
            if not outcome.state.is_completed:
                return Outcome(outcome.state, f"step {step}: {outcome.reason or outcome.state}", outcome.rank)
            result = result_location(step_store, own_id)
        outputs[step] = str(result)
    link_result(run_store, result)
    return Outcome(RunState.COMPLETED)


def _run_step(
    run_store: RunStore, above: RunRecord, workflow: WorkflowSpec, step: str, outputs: dict[str, str],
    interrupts: Interrupts, recording: Recording, folder: Path,
) -> Outcome:  # fmt: skip
    from sm_llm.launcher.planner import plan_job
    from sm_llm.spec.job import spec_digest
    from sm_llm.spec.references import resolve, workflow_job

    if interrupts.count:
        return Outcome(RunState.STOPPED, "asked to stop before it began")
    try:
        job = resolve(workflow_job(workflow, step), {}, outputs)
        found = plan_job(absolute_inputs(job, folder)[0], step=step)
        assert_supported([found])
        plan = replace(found, job=job, digest=spec_digest(job))  # in the record, and compared, as it was written
    except SmLlmError as error:
        return Outcome(RunState.FAILED, str(error))
    write_submission(next_submission(run_store, above, plan, folder))
    return run_attempt(run_store, interrupts, quiet=recording.quiet, folder=folder)
