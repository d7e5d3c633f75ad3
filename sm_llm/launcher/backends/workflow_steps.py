"""Workflows on platforms that start the steps themselves, each as a job of its own run below the workflow's.

A step reads earlier ones at their stable addresses, which are known before any of them begins.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.attempt_outcome import record_outcome
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.build_submission import build_submission, new_record
from sm_llm.launcher.job_inputs import rendered
from sm_llm.launcher.planner import plan_workflow
from sm_llm.launcher.planning.plan import assert_supported
from sm_llm.runs.locate import launch_folder, remember_launch
from sm_llm.runs.outcome import Outcome
from sm_llm.runs.results import has_final, link_result, result_location
from sm_llm.runs.run_paths import STEPS, step_run_id
from sm_llm.runs.run_record import RequestedRun
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job import spec_digest
from sm_llm.spec.references import resolve, workflow_job
from sm_llm.storage.publication.result import RESULT
from sm_llm.storage.uri import join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec

# What names the end of a workflow: jobs that waited for a failed one are only cancelled.
_WORST = (RunState.FAILED, RunState.INTERRUPTED, RunState.COMPLETED_UNPUBLISHED, RunState.STOPPED)
_ALIVE = (RunState.RUNNING, RunState.RESTARTING, RunState.UNKNOWN, RunState.PENDING)


def previewed(workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str) -> Iterator[Submission]:
    """What every step of a workflow that is new would be sent."""
    for plan in plans:
        assert plan.step is not None
        own, address = step_run_id(run_id, plan.step), join(run_uri, STEPS, plan.step)
        yield rendered(at_stable_addresses(workflow, plan, run_uri), own, address)


def at_stable_addresses(workflow: WorkflowSpec, plan: Plan, run_uri: str) -> Plan:
    """The plan of a step that reads earlier ones at the addresses of their results."""
    assert plan.step is not None
    outputs = {name: join(run_uri, STEPS, name, RESULT) for name in workflow.steps}
    job = resolve(workflow_job(workflow, plan.step), {}, outputs)
    return replace(plan, job=job, digest=spec_digest(job))


def behind(submission: Submission, steps: Sequence[str]) -> Submission:
    """``submission`` of a step, with what it starts after: names of steps, or their jobs' ids."""
    return replace(submission, request={**submission.request, "after": list(steps)})


def has_result(run_store: RunStore, above: RunRecord, step: str) -> bool:
    """Whether a step of the workflow at ``run_store`` has published its result. ``above`` is the workflow's record."""
    step_store = run_store.below(STEPS, step)
    return step_store.exists() and has_final(step_store, step_run_id(above.run_id, step))


def plans_without_result(run_store: RunStore, record: RunRecord, workflow: WorkflowSpec) -> list[Plan]:
    """The plans of the steps that a further attempt of the workflow in ``record`` has to start.

    Raises ``PlanError`` for what cannot run, and ``SubmitError`` where every step has its result.
    """
    plans = [it for it in plan_workflow(workflow) if not has_result(run_store, record, str(it.step))]
    if not plans:
        raise SubmitError(f"{run_store.uri}: every step has its result")
    assert_supported(plans)
    return plans


def step_submission(
    run_store: RunStore, record: RunRecord, workflow: WorkflowSpec, plan: Plan
) -> tuple[RunStore, Submission]:
    """Where a step of the workflow in ``record`` has its own run, and the submission of that run's next attempt."""
    step_store = run_store.below(STEPS, str(plan.step))
    stable = at_stable_addresses(workflow, plan, run_store.uri)
    return step_store, next_submission(step_store, record, stable, launch_folder(run_store, record))


def next_submission(run_store: RunStore, above: RunRecord, plan: Plan, folder: Path | None) -> Submission:
    """The submission of the next attempt of a step's run in ``run_store``, whose record is written or follows ``plan``.

    ``folder`` is what its relative inputs are relative to.
    """
    assert plan.step is not None
    summary = [plan.to_json()]
    if not run_store.exists():
        run_id = step_run_id(above.run_id, plan.step)
        record = new_record(run_id, plan.job, plan.digest, {}, summary, created=time.time(), folder=folder)
        run_store.create(record)
        remember_launch(run_store, record)
    elif run_store.record().spec_digest != plan.digest:
        # The workflow was resumed with changes: the step's record follows, and goes back with it.
        asked = RequestedRun(spec=plan.job.model_dump(mode="json"), spec_digest=plan.digest, plan=summary)
        run_store.update(lambda held: held.changed(asked, held.next_attempt, ()))
    return build_submission(plan, run_store, run_store.record(), folder=folder)


def alive(found: Mapping[str, NativeState]) -> NativeState | None:
    """The state of a workflow while steps of it have not ended; None once all in ``found`` have."""
    going = {step: it for step, it in found.items() if not it.state.is_final}
    if not going:
        return None
    # One that failed is named while others still run: its end is known, that of the workflow is not.
    state = next(state for state in _ALIVE if any(it.state is state for it in going.values()))
    named = [f"step {step}: {_words(it)}" for step, it in found.items() if it.state in (state, RunState.FAILED)]
    return NativeState(state, "; ".join(named))


def settled(
    run_store: RunStore, record: RunRecord, last: Attempt, found: Mapping[str, NativeState], never_begun: str
) -> NativeState:
    """Record how a workflow has ended, all of whose steps have; ``never_begun`` are the words for one without a job."""
    outcome = _outcome(record, found, never_begun)
    if outcome.state is RunState.COMPLETED and not run_store.is_remote:
        step = list(record.spec["steps"])[-1]
        link_result(run_store, result_location(run_store.below(STEPS, step), step_run_id(record.run_id, step)))
    steps = (run_store.below(STEPS, name) for name in record.spec["steps"])
    return NativeState.of(record_outcome(run_store, last, outcome, steps=steps))


def _outcome(record: RunRecord, found: Mapping[str, NativeState], never_begun: str) -> Outcome:
    for state in _WORST:
        for step, it in found.items():
            if it.state is state:
                return Outcome(state, f"step {step}: {_words(it)}")
    if missing := [step for step in record.spec["steps"] if step not in found]:
        return Outcome(RunState.STOPPED, f"step {missing[0]}: {never_begun}")
    return Outcome(RunState.COMPLETED)


def _words(native: NativeState) -> str:
    return native.detail or native.state.value
