"""Runs the steps of a workflow in turn on this machine; each step is a run of its own below ``steps/``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.run_paths import RunPaths
from sm_llm.contract.run_record import RunRecord
from sm_llm.contract.states import RunState
from sm_llm.errors import SmLlmError
from sm_llm.launcher.attempt import recorded, run_attempt
from sm_llm.launcher.local_run import write_submission
from sm_llm.launcher.results import link_result, result_folder
from sm_llm.launcher.stage import new_record, stage
from sm_llm.launcher.verdict import Ending
from sm_llm.spec.job import WorkflowSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.processes import Interrupts


def step_root(root: Path, step: str) -> Path:
    """The run folder of one step."""
    return root / "steps" / step


def step_run_id(run_id: str, step: str) -> str:
    """A step's own run id."""
    return f"{run_id}-{step}"


def run_workflow(root: Path, interrupts: Interrupts, on_started: Callable[[], None] = lambda: None) -> Ending:
    """Run every step that has no published result yet, in order; the first that does not complete ends the workflow."""
    record = RunRecord.read(RunPaths(root).record)
    workflow = record.load_spec()
    assert isinstance(workflow, WorkflowSpec)
    with recorded(root, record.next_attempt, on_started) as record_end:
        ending = _run_steps(root, record.run_id, workflow, interrupts)
        record_end(ending)
    return ending


def _run_steps(root: Path, run_id: str, workflow: WorkflowSpec, interrupts: Interrupts) -> Ending:
    outputs: dict[str, str] = {}
    for step in workflow.steps:
        folder = step_root(root, step)
        has_begun = RunPaths(folder).record.is_file()
        result = result_folder(folder, step_run_id(run_id, step)) if has_begun else None
        if result is None:
            ending = _run_step(folder, step_run_id(run_id, step), workflow, step, outputs, interrupts)
            if ending.state is not RunState.COMPLETED:
                return Ending(ending.state, f"step {step}: {ending.reason or ending.state}", ending.rank)
            result = result_folder(folder, step_run_id(run_id, step))
        assert result is not None
        outputs[step] = str(result)
    link_result(root, Path(outputs[step]))
    return Ending(RunState.COMPLETED)


def _run_step(
    folder: Path, run_id: str, workflow: WorkflowSpec, step: str, outputs: dict[str, str], interrupts: Interrupts
) -> Ending:
    from sm_llm.launcher.plan import plan_job
    from sm_llm.spec.references import resolve, workflow_job

    if interrupts.count:
        return Ending(RunState.STOPPED, "asked to stop before it began")
    try:
        plan = plan_job(resolve(workflow_job(workflow, step), {}, outputs), step=step)
    except SmLlmError as error:
        return Ending(RunState.FAILED, str(error))
    paths = RunPaths(folder)
    if not paths.record.is_file():
        new_record(run_id, plan.job, plan.digest, {}, [plan.to_json()], created=time.time()).write(paths.record)
    elif RunRecord.read(paths.record).spec_digest != plan.digest:
        # The workflow was resumed with changes: the step's record follows.
        changed = {"spec": plan.job.model_dump(mode="json"), "spec_digest": plan.digest, "plan": [plan.to_json()]}
        RunRecord.update(paths.record, lambda record: record.model_copy(update=changed))
    write_submission(stage(plan, folder, RunRecord.read(paths.record)))
    return run_attempt(folder, interrupts)
