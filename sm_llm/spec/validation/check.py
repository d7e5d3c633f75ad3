"""The phase spec of the checks: what shows only when several fields of a specification are read together.

Each list below holds the checkers of one subject, in the order in which their issues are reported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sm_llm.errors import Issue
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.machines.compute import gpu_issues
from sm_llm.spec.references import references, workflow_job
from sm_llm.spec.tasks import PrecompileTask, parallelism_of, training_of
from sm_llm.spec.validation import address_checks, task_checks, training_checks
from sm_llm.spec.validation.runner import blocked_by, gathered, run
from sm_llm.spec.validation.training_checks import TrainingSubject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.validation.runner import Checker


def check(spec: JobSpec | WorkflowSpec) -> list[Issue]:
    """Every issue of a well-formed specification, with paths relative to it."""
    found = run(SHARED_CHECKERS, spec)
    if isinstance(spec, JobSpec):
        return [*found, *_body_issues(spec), *run(SINGLE_JOB_CHECKERS, spec)]
    found += run(WORKFLOW_CHECKERS, spec)
    # Each step is checked as the job that it becomes.
    bodies = {name: _body_issues(workflow_job(spec, name)) for name in spec.steps}
    return [*found, *gathered(spec, bodies, found)]


def _body_issues(job: JobSpec) -> list[Issue]:
    """Issues of what a job has of its own, alone and as a step."""
    found = run(JOB_CHECKERS, job)
    if (task := training_of(job.task)) is not None:
        # After the checkers of the job: wrong machines and degrees block the arithmetic of the batch.
        further = run(TRAINING_CHECKERS, TrainingSubject(task, job.compute), found)
        found += map(_of_precompiled, further) if isinstance(job.task, PrecompileTask) else further
    return found


def _of_precompiled(issue: Issue) -> Issue:
    """An issue of the training that a precompile task holds."""
    return replace(issue, path=issue.path.replace("task.", "task.training.", 1))


def check_step_names(workflow: WorkflowSpec) -> Iterator[Issue]:
    """Names of steps, which are parts of those of jobs."""
    for name in workflow.steps:
        yield from address_checks.name_issues(f"steps.{name}", name, suffix_of=workflow.name)


def check_step_order(workflow: WorkflowSpec) -> Iterator[Issue]:
    """Steps that refer to themselves, to later ones or to none."""
    earlier: list[str] = []
    for name, step in workflow.steps.items():
        prefix = f"steps.{name}"
        wanted = [(f"{prefix}.after", other) for other in step.after]
        wanted += [(f"{prefix}.{path}", other) for path, kind, other in references(step) if kind == "step"]
        for path, other in wanted:
            if other not in earlier:
                known = f"Steps before {name}: {', '.join(earlier) or 'none'}"
                problem = "refers to itself or a later step" if other in workflow.steps else "there is no such step"
                yield Issue("step-reference-unknown", path, problem, other, known)
        # After its own references: a step does not come before itself.
        earlier.append(name)


def check_machines(job: JobSpec) -> Iterator[Issue]:
    """Machines that the backend does not have. The number of processes follows from them."""
    yield from job.backend.compute_issues(job.compute)
    yield from gpu_issues(job.compute)


@blocked_by("compute.instance_type", "backend.instance_groups")
def check_degrees(job: JobSpec) -> Iterator[Issue]:
    """Degrees that do not fit the processes, or one another."""
    parallelism = parallelism_of(job.task)
    if parallelism is not None:
        for issue in parallelism.degree_issues(job.compute.world_size, job.compute.processes):
            yield _of_precompiled(issue) if isinstance(job.task, PrecompileTask) else issue


SHARED_CHECKERS: tuple[Checker[JobSpec | WorkflowSpec], ...] = (
    address_checks.check_name,
    address_checks.check_storage_address,
    address_checks.check_storage_class,
)
"""What a job and a workflow have alike."""
WORKFLOW_CHECKERS: tuple[Checker[WorkflowSpec], ...] = (check_step_names, check_step_order)
JOB_CHECKERS: tuple[Checker[JobSpec], ...] = (
    address_checks.check_environment,
    address_checks.check_inputs,
    address_checks.check_input_settings,
    address_checks.check_unread_inputs,
    address_checks.check_addresses,
    check_machines,
    check_degrees,
    task_checks.check_tokenizer,
    task_checks.check_fetch_source,
    task_checks.check_conversion,
    task_checks.check_registration,
    task_checks.check_precompiled_strategy,
    task_checks.check_program_entry,
    task_checks.check_program_arguments,
    task_checks.check_placeholders,
    task_checks.check_program_folders,
    task_checks.check_program_strategy,
    address_checks.check_input_variables,
)
"""Of a job alone, and of every step."""
TRAINING_CHECKERS: tuple[Checker[TrainingSubject], ...] = (
    training_checks.check_stream,
    training_checks.check_length,
    training_checks.check_model,
    training_checks.check_optimiser,
    training_checks.check_precision,
    training_checks.check_profile,
    training_checks.check_strategy,
    training_checks.check_batch,
)
"""Of the task of a training, and of the training that is compiled ahead."""
SINGLE_JOB_CHECKERS: tuple[Checker[JobSpec], ...] = (address_checks.check_step_references,)
"""Of a job that is not a step."""
