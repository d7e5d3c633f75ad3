"""Workflows on Slurm: every step is a job of its own, all submitted at once; each waits for those that it reads from.

Slurm itself starts the steps, so no process of ours has to live as long as the workflow.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.attempt_outcome import record_outcome
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.slurm.jobs import SUBMIT_SECONDS, stop_job
from sm_llm.launcher.backends.slurm.paths import SEPARATOR, native_id
from sm_llm.launcher.backends.slurm.submit import check_cluster, submit
from sm_llm.launcher.build_submission import build_submission, new_record, recorded_workflow
from sm_llm.launcher.job_inputs import rendered
from sm_llm.launcher.planner import plan_workflow
from sm_llm.launcher.planning.plan import assert_supported
from sm_llm.launcher.submission import claimed
from sm_llm.runs.locate import launch_folder, remember_launch
from sm_llm.runs.outcome import Outcome
from sm_llm.runs.results import has_final, link_result, result_place
from sm_llm.runs.run_paths import STEPS, RunPaths, step_run_id
from sm_llm.runs.run_record import Attempt, RequestedRun
from sm_llm.runs.run_states import RunState
from sm_llm.spec.backends.slurm import SlurmOptions
from sm_llm.spec.job import spec_digest
from sm_llm.spec.references import resolve, workflow_job
from sm_llm.storage.publication.result import RESULT
from sm_llm.storage.uri import join
from sm_llm.terminal import quoted, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec

_WORST = (RunState.FAILED, RunState.INTERRUPTED, RunState.COMPLETED_UNPUBLISHED, RunState.STOPPED)
"""What names the end of a workflow: jobs that waited for a failed one are only cancelled."""
_ALIVE = (RunState.RUNNING, RunState.RESTARTING, RunState.UNKNOWN, RunState.PENDING)


def submissions(workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str) -> list[Submission]:
    """What every step would be sent; ``<STEP>`` stands for the id of that step's job."""
    found = []
    for plan in plans:
        assert plan.step is not None
        own, place = step_run_id(run_id, plan.step), join(run_uri, STEPS, plan.step)
        found.append(_after(rendered(_resolved(workflow, plan, run_uri), own, place), [f"<{it}>" for it in plan.after]))
    return found


def _after(submission: Submission, job_ids: Sequence[str]) -> Submission:
    return replace(submission, request={**submission.request, "after": list(job_ids)})


def _resolved(workflow: WorkflowSpec, plan: Plan, run_uri: str) -> Plan:
    """The plan of a step that reads earlier ones at their stable addresses, which are known before they begin."""
    assert plan.step is not None
    outputs = {name: join(run_uri, STEPS, name, RESULT) for name in workflow.steps}
    job = resolve(workflow_job(workflow, plan.step), {}, outputs)
    return replace(plan, job=job, digest=spec_digest(job))


def start(home: RunStore, connect: Callable[[str | None], Cluster]) -> str:
    """Submit every step of the workflow recorded in ``home`` that has no result yet; returns the native id.

    Raises ``SubmitError``; then no job of it is left.
    """
    record = home.record()
    workflow = recorded_workflow(home, record)
    options = SlurmOptions.of(workflow)
    cluster = connect(options.ssh_host)
    check_cluster(options, cluster)
    plans = plan_workflow(workflow)
    assert_supported(plans)
    folder = launch_folder(home, record)
    jobs: dict[str, str] = {}
    try:
        for plan in plans:
            assert plan.step is not None
            place = home.below(STEPS, plan.step)
            if place.exists() and has_final(place, step_run_id(record.run_id, plan.step)):
                continue
            # A step that has its result has no job in this attempt, and nothing waits for it.
            after = [jobs[it] for it in plan.after if it in jobs]
            jobs[plan.step] = _start_step(place, record, _resolved(workflow, plan, home.uri), after, cluster, folder)
    except BaseException:  # Ctrl-C, too: half a workflow would wait, or run, without anyone who knows of it
        for job_id in reversed(jobs.values()):
            with suppress(SubmitError):
                cluster.cancel(job_id)
        raise
    if not jobs:
        raise SubmitError(f"{home.uri}: every step has its result")
    say(
        f"submitted {', '.join(f'{step} as job {it}' for step, it in jobs.items())} through {cluster.transport.where}",
        f"follow it with: sm-llm logs -f {quoted(home.uri)}",
        err=True,
    )
    return native_id(options.ssh_host, SEPARATOR.join(jobs.values()))


def _start_step(
    home: RunStore, above: RunRecord, plan: Plan, after: Sequence[str], cluster: Cluster, folder: Path | None
) -> str:
    """Submit the next attempt of a step's own run at ``home``, behind the jobs ``after``; returns the job's id.

    ``folder`` is what its relative inputs are relative to.
    """
    assert plan.step is not None
    summary = [plan.to_json()]
    if not home.exists():
        run_id = step_run_id(above.run_id, plan.step)
        record = new_record(run_id, plan.job, plan.digest, {}, summary, created=time.time(), folder=folder)
        home.create(record)
        remember_launch(home, record)
    elif home.record().spec_digest != plan.digest:
        # The workflow was resumed with changes: the step's record follows.
        asked = RequestedRun(spec=plan.job.model_dump(mode="json"), spec_digest=plan.digest, plan=summary)
        home.update(lambda held: held.asking(asked))
    submission = _after(build_submission(plan, home, home.record(), folder=folder), after)
    number = submission.job.attempt
    attempt = Attempt.claim(number, request=RunPaths.request_key(number))
    with claimed(home, attempt):
        job_id = submit(submission, cluster)
    begun = attempt.model_copy(update={"native_id": native_id(SlurmOptions.of(plan.job).ssh_host, job_id)})
    home.update(lambda held: held.with_attempt(begun))
    return job_id


def steps_of(home: RunStore, record: RunRecord) -> Iterator[tuple[str, RunStore]]:
    """The steps of the workflow in ``record`` that have been submitted, in order, with the homes of their runs."""
    for step in record.spec["steps"]:
        place = home.below(STEPS, step)
        if place.exists() and place.record().attempts:
            yield step, place


def state_of(home: RunStore, record: RunRecord, describe: Callable[[RunStore], NativeState]) -> NativeState:
    """The state of the newest attempt in a workflow's ``record``, from its steps' jobs; settled once all have ended.

    ``describe`` gives that of one step. Raises ``NoAnswer``: nothing is known, and nothing was changed.
    """
    last = record.attempts[-1]
    found = {step: describe(place) for step, place in steps_of(home, record)}
    alive = {step: it for step, it in found.items() if not it.state.is_final}
    if alive:
        # One that failed is named while others still run: its end is known, that of the workflow is not.
        state = next(state for state in _ALIVE if any(it.state is state for it in alive.values()))
        going = [f"step {step}: {_words(it)}" for step, it in found.items() if it.state in (state, RunState.FAILED)]
        return NativeState(state, "; ".join(going))
    if last.is_claim and abs(time.time() - last.started) < SUBMIT_SECONDS:
        return NativeState(RunState.PENDING, "its jobs are being submitted")
    outcome = _ending(record, found)
    if outcome.state is RunState.COMPLETED and not home.is_remote:
        step, place = list(steps_of(home, record))[-1]
        link_result(home, result_place(place, step_run_id(record.run_id, step)))
    return NativeState.of(record_outcome(home, last, outcome))


def _ending(record: RunRecord, found: Mapping[str, NativeState]) -> Outcome:
    for state in _WORST:
        for step, it in found.items():
            if it.state is state:
                return Outcome(state, f"step {step}: {_words(it)}")
    if missing := [step for step in record.spec["steps"] if step not in found]:
        return Outcome(RunState.STOPPED, f"step {missing[0]}: its job was never submitted")
    return Outcome(RunState.COMPLETED)


def _words(native: NativeState) -> str:
    return native.detail or native.state.value


def stop(
    home: RunStore, record: RunRecord, cluster: Cluster, describe: Callable[[RunStore], NativeState], *, now: bool
) -> None:
    """Cancel the jobs that wait and ask those that run to stop; with ``now`` cancel all of them."""
    # The last first: a job that waits must not start once the one before it has ended.
    # Described again one by one: a step may have ended since its successor was cancelled.
    for _, place in reversed(list(steps_of(home, record))):
        own = place.record()
        if not (attempt := own.attempts[-1]).is_claim and not describe(place).state.is_final:
            stop_job(own, attempt, cluster, now=now)
