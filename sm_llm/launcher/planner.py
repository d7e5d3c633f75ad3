"""From a specification to its Plans, checked before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, PlanError, SpecError, warning
from sm_llm.launcher.planning.checks import DATA_CHECKERS, MODEL_CHECKERS
from sm_llm.launcher.planning.draft import Draft, UpstreamOutput
from sm_llm.launcher.planning.model_facts import known_preset
from sm_llm.launcher.planning.plan import Plan
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.tasks import PrepareTask, TrainTask, training_of
from sm_llm.spec.training import CheckpointStart
from sm_llm.spec.validation.runner import at_other_fields, errors_of, gathered, run, without_duplicates
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from sm_llm.spec.loading.load import InvalidSpec, Loaded
    from sm_llm.spec.loading.overrides import Override

Source = str | Path | Mapping[str, Any] | JobSpec | WorkflowSpec
"""What can be planned and launched: a recipe's name, a YAML file, a mapping, or a specification."""


def plan(source: Source, *overrides: Override, **fields: Any) -> list[Plan]:
    """Plan a job (one Plan) or a workflow (one per step, in order). Nothing is started or written.

    Args:
        source: recipe name, YAML file, mapping or specification.
        overrides: ``key.path=value`` with a YAML scalar as value, as on the command line.
        fields: the same by keyword: ``compute={"instance_count": 2}``.

    Raises:
        SpecError: the specification is wrong; all issues at once.
        PlanError: it is well-formed, but model, data and machine do not fit; all issues at once.
    """
    return plan_with_starts(load_whole(source, overrides, fields))


def plan_with_starts(loaded: Loaded) -> list[Plan]:
    """``plan`` for a specification that was loaded already: its Plans, and what their tasks start from is there."""
    from sm_llm.launcher.planning.input_locations import assert_starts_exist

    plans = plan_loaded(loaded)
    assert_starts_exist(plans)
    compare_local_starts(plans)
    return plans


def compare_local_starts(plans: Sequence[Plan]) -> None:
    """Raise ``PlanError`` where a checkpoint on this machine does not fit the model or data that it is to start."""
    if any(isinstance(it.job.task, TrainTask) and isinstance(it.job.task.start, CheckpointStart) for it in plans):
        from sm_llm.launcher.continuation import compare_starts

        compare_starts(plans, remote=False)


def check_from_here(plans: Sequence[Plan]) -> bool:
    """What a plan can ask from this machine: places in S3, and who calls. Raises ``PlanError`` for places.

    Returns whether the storage answers.
    """
    from sm_llm.launcher.backend import KnowsCaller, backend
    from sm_llm.launcher.planning.input_locations import refuse_locations

    answers = refuse_locations(plans)
    notes: dict[str, None] = {}
    for it in plans:
        found = backend(it.job.backend.name)
        notes |= dict.fromkeys(found.caller_notes(it) if isinstance(found, KnowsCaller) else ())
    for note in notes:
        echo(f"  warning: {note}", err=True)
    return answers


def load_whole(
    source: Source,
    overrides: Sequence[Override] = (),
    fields: Mapping[str, Any] | None = None,
    *,
    recorded: Mapping[str, str] | None = None,
) -> Loaded:
    """``spec.loading.load``; where the specification is faulty, its ``SpecError`` lists those of the plan as well.

    ``recorded``: where the values of a run's record, which is a mapping, were written.
    """
    from sm_llm.spec.loading.load import InvalidSpec, load

    try:
        return load(source, overrides, fields)
    except SpecError as error:
        issues = [*error.issues, *(_beyond(error) if isinstance(error, InvalidSpec) else ())]
        if recorded is not None:
            own = {it.path: recorded.get(it.path, "the run's record") for it in issues}
            issues = [replace(it, origin=own[it.path]) if it.origin == "Python" else it for it in issues]
        raise SpecError(issues) from None


def _beyond(error: InvalidSpec) -> list[Issue]:
    """Issues of the plan of an invalid specification, at fields that are not reported already."""
    try:
        plan_loaded(error.loaded)
    except (SpecError, PlanError) as further:
        return at_other_fields(further.issues, error.issues)
    except Exception:  # it may be just what the specification's issues make impossible
        return []
    return []


def plan_loaded(loaded: Loaded) -> list[Plan]:
    """Plans of a loaded specification, starts not checked; issues name where each value was written."""
    try:
        if isinstance(loaded.spec, WorkflowSpec):
            return plan_workflow(loaded.spec, loaded.origins)
        return [plan_job(loaded.spec, origins=loaded.origins)]
    except PlanError as error:
        raise PlanError([replace(it, origin=loaded.origins.get(it.path, it.origin)) for it in error.issues]) from None


def plan_workflow(workflow: WorkflowSpec, origins: Mapping[str, str] | None = None) -> list[Plan]:
    """A Plan per step, in the order of the file, which references already obey."""
    from sm_llm.launcher.backend import backend, without_workflows
    from sm_llm.spec.references import resolve, step_dependencies, workflow_job

    plans: list[Plan] = []
    issues: dict[str, tuple[Issue, ...]] = {}
    # Outputs do not exist yet: a reference stays itself, and facts come from the earlier step's own specification.
    outputs = {name: f"steps.{name}.output" for name in workflow.steps}
    tasks = {name: step.task for name, step in workflow.steps.items()}
    upstream = {
        name: UpstreamOutput.of(task) if isinstance(task, PrepareTask) else None for name, task in tasks.items()
    }
    presets = {name: known_preset(tasks, name) for name in tasks}
    for name in workflow.steps:
        prefix = f"steps.{name}."
        # The origins name paths of the workflow, a plan those of its own job.
        shared = tuple(f"{block}." for block in ("storage_options", "backend"))
        given = (origins or {}).items()
        own = {path.removeprefix(prefix): text for path, text in given if path.startswith((prefix, *shared))}
        try:
            job = resolve(workflow_job(workflow, name), {}, outputs)
            after = tuple(sorted(step_dependencies(workflow, name), key=list(workflow.steps).index))
            plans.append(plan_job(job, origins=own, upstream=upstream, presets=presets, step=name, after=after))
        except (PlanError, SpecError) as error:
            issues[name] = error.issues
    if issues:
        raise PlanError(list(gathered(workflow, issues)))
    plans[0] = replace(plans[0], issues=(*plans[0].issues, *_unread_machines(workflow, origins or {})))
    # A property of the whole workflow, so one plan is enough to hold it.
    if without := without_workflows(backend(workflow.backend.name)):
        plans[0] = replace(plans[0], unsupported=(without, *plans[0].unsupported))
    return plans


def _unread_machines(workflow: WorkflowSpec, origins: Mapping[str, str]) -> Iterator[Issue]:
    """Machines of a workflow all of whose steps have their own."""
    # What this machine has fills the block by itself.
    is_given = any(path.startswith("compute.") and not it.startswith("this machine") for path, it in origins.items())
    if is_given and all(step.compute is not None for step in workflow.steps.values()):
        message = "has no effect: every step has machines of its own"
        yield warning("workflow-machines-without-effect", "compute", message)


def plan_job(
    job: JobSpec,
    *,
    origins: Mapping[str, str] | None = None,
    upstream: Mapping[str, UpstreamOutput | None] | None = None,
    presets: Mapping[str, str | None] | None = None,
    step: str | None = None,
    after: Sequence[str] = (),
) -> Plan:
    """The Plan of one job. Raises ``PlanError`` with every issue found."""
    from sm_llm.launcher.backend import backend
    from sm_llm.spec.job import spec_digest
    from sm_llm.spec.references import resolve

    job = resolve(job, {}, {name: f"steps.{name}.output" for name in upstream or {}})
    draft = Draft(job, upstream or {}, origins or {}, presets or {})
    found = run(MODEL_CHECKERS, draft)
    found += run(DATA_CHECKERS, draft, found)
    rows = draft.rows.value
    plan = Plan(
        job=job,
        digest=spec_digest(job),
        world_size=job.compute.world_size,
        derived=draft.derived.value,
        model=draft.model,
        rows=rows.rows if rows else None,
        # An estimate from values with errors would mislead.
        memory=None if errors_of(found) else draft.memory,
        choice=None if errors_of(found) else draft.choice,
        attention=draft.attention,
        step=step,
        after=tuple(after),
        origins=dict(origins or {}),
    )
    # The backend is asked even after errors, so that all issues are reported at once.
    checks = backend(job.backend.name).plan_checks(plan)
    found += without_duplicates(checks.issues, found)
    if errors := errors_of(found):
        raise PlanError(errors)
    unsupported = (*without_worker(job, step), *checks.unsupported)
    return replace(plan, issues=tuple(found), target=checks.target, unsupported=unsupported)


def without_worker(job: JobSpec, step: str | None = None) -> Iterator[Issue]:
    """The strategy of a task, where this version has no worker for it."""
    prefix = f"steps.{step}." if step else ""
    remedy = "This version plans and renders it (the verb plan, and fit with --dry-run), but cannot run it"
    training = training_of(job.task)
    if training is not None and not training.parallelism.can.train:
        holder = "task" if isinstance(job.task, TrainTask) else "task.training"
        path, strategy = f"{prefix}{holder}.parallelism.strategy", training.parallelism.strategy
        yield Issue(
            "strategy-without-worker", path, f"there is no worker for the strategy {strategy} yet", strategy, remedy
        )
