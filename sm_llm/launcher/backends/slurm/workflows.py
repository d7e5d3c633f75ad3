"""Workflows on Slurm: every step is a job of its own, all submitted at once; each waits for those that it reads from.

Slurm itself starts the steps, so no process of ours has to live as long as the workflow.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SubmitError
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.slurm.cluster import dependency
from sm_llm.launcher.backends.slurm.jobs import SUBMIT_SECONDS, stop_job
from sm_llm.launcher.backends.slurm.paths import SEPARATOR, native_id
from sm_llm.launcher.backends.slurm.submit import check_cluster, submit
from sm_llm.launcher.backends.workflow_steps import (
    alive,
    behind,
    plans_without_result,
    previewed,
    settled,
    step_submission,
)
from sm_llm.launcher.build_submission import recorded_workflow
from sm_llm.launcher.submission import claimed
from sm_llm.runs.run_paths import STEPS, RunPaths
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState
from sm_llm.spec.backends.slurm import SlurmOptions
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.backends.slurm.cluster import Cluster
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec


def submissions(workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str) -> list[Submission]:
    """What every step would be sent; ``<STEP>`` stands for the id of that step's job."""
    found = previewed(workflow, plans, run_id, run_uri)
    waiting = [behind(it, [f"<{step}>" for step in plan.after]) for plan, it in zip(plans, found, strict=True)]
    return [replace(it, document=_document(plan.step, it.request)) for plan, it in zip(plans, waiting, strict=True)]


def _document(step: str | None, request: Mapping[str, Any]) -> str:
    """The script of one step among those of others."""
    waits = dependency(request["after"])
    return f"# Step {step}: sbatch {f'--dependency={waits} ' if waits else ''}job.sh\n{request['script']}\n"


def start(run_store: RunStore, connect: Callable[[str | None], Cluster]) -> str:
    """Submit every step of the workflow recorded in ``run_store`` that has no result yet; returns the native id.

    Raises ``SubmitError``; then no job of it is left.
    """
    record = run_store.record()
    workflow = recorded_workflow(run_store, record)
    options = SlurmOptions.of(workflow)
    cluster = connect(options.ssh_host)
    # Before any step: what the cluster refuses would otherwise be half submitted.
    check_cluster(options, cluster)
    plans = plans_without_result(run_store, record, workflow)
    jobs: dict[str, str] = {}
    try:
        for plan in plans:
            step_store, submission = step_submission(run_store, record, workflow, plan)
            # A step that has its result has no job in this attempt, and nothing waits for it.
            after = [jobs[it] for it in plan.after if it in jobs]
            jobs[str(plan.step)] = _start_step(step_store, behind(submission, after), cluster)
    except BaseException:  # Ctrl-C, too: half a workflow would wait, or run, without anyone who knows of it
        for job_id in reversed(jobs.values()):
            with suppress(SubmitError):
                cluster.cancel(job_id)
        raise
    echo(
        f"submitted {', '.join(f'{step} as job {it}' for step, it in jobs.items())} through {cluster.transport.where}",
        f"follow it with: sm-llm logs -f {quoted(run_store.uri)}",
        err=True,
    )
    return native_id(options.ssh_host, SEPARATOR.join(jobs.values()))


def _start_step(run_store: RunStore, submission: Submission, cluster: Cluster) -> str:
    """Submit the next attempt of a step's own run at ``run_store``; returns the job's id."""
    number = submission.job.attempt
    attempt = Attempt.claim(number, request=RunPaths.request_key(number))
    with claimed(run_store, attempt):
        job_id = submit(submission, cluster)
    # sbatch has answered: until here the job could be found by the folder of its attempt alone.
    begun = attempt.model_copy(update={"native_id": native_id(SlurmOptions.of(submission.job.spec).ssh_host, job_id)})
    run_store.update(lambda held: held.with_attempt(begun))
    return job_id


def steps_of(run_store: RunStore, record: RunRecord) -> Iterator[tuple[str, RunStore]]:
    """The steps of the workflow in ``record`` that have been submitted, in order, with the stores of their runs."""
    for step in record.spec["steps"]:
        step_store = run_store.below(STEPS, step)
        if step_store.exists() and step_store.record().attempts:
            yield step, step_store


def state_of(run_store: RunStore, record: RunRecord, describe: Callable[[RunStore], NativeState]) -> NativeState:
    """The state of the newest attempt in a workflow's ``record``, from its steps' jobs; settled once all have ended.

    ``describe`` gives that of one step. Raises ``NoAnswer``: nothing is known, and nothing was changed.
    """
    last = record.attempts[-1]
    found = {step: describe(step_store) for step, step_store in steps_of(run_store, record)}
    if (native := alive(found)) is not None:
        return native
    # Either sign: the clock of the launching machine may be ahead of this one's.
    if last.is_claim and abs(time.time() - last.started) < SUBMIT_SECONDS:
        return NativeState(RunState.PENDING, "its jobs are being submitted")
    return settled(run_store, record, last, found, "its job was never submitted")


def stop(
    run_store: RunStore, record: RunRecord, cluster: Cluster, describe: Callable[[RunStore], NativeState], *, now: bool
) -> None:
    """Cancel the jobs that wait and ask those that run to stop; with ``now`` cancel all of them."""
    # The last first: a job that waits must not start once the one before it has ended.
    # Described again one by one: a step may have ended since its successor was cancelled.
    for _, step_store in reversed(list(steps_of(run_store, record))):
        own = step_store.record()
        if not (attempt := own.attempts[-1]).is_claim and not describe(step_store).state.is_final:
            stop_job(own, attempt, cluster, now=now)
