"""From a specification to its Plans, checked before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sm_llm.data.describe import RowsInfo, describe_rows
from sm_llm.errors import DataError, Issue, PlanError, SpecError
from sm_llm.launcher.planning.checks import (
    check_prepare,
    check_train,
    storage_issues,
    storage_warnings,
    train_warnings,
)
from sm_llm.launcher.planning.data_warnings import data_warnings
from sm_llm.launcher.planning.local_places import is_reference, local_folder
from sm_llm.launcher.planning.memory import MemoryEstimate, memory_estimate
from sm_llm.launcher.planning.model_facts import (
    ModelFacts,
    check_pretrained,
    model_facts,
    planned_config,
    pretrained_source,
)
from sm_llm.launcher.planning.plan import Plan
from sm_llm.launcher.planning.plan_settings import random_token_warnings
from sm_llm.launcher.planning.program_checks import program_warnings
from sm_llm.launcher.planning.upstream import Upstream
from sm_llm.spec.derive import Derived, derive_task
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.machines.gpus import smallest_gpu
from sm_llm.spec.tasks import TASK_KINDS, PrepareTask, TrainTask

if TYPE_CHECKING:
    from sm_llm.spec.loading.load import InvalidSpec, Loaded
    from sm_llm.spec.loading.overrides import Override
    from sm_llm.spec.machines.compute import ComputeSpec
    from sm_llm.spec.machines.hardware import Instance

TRAINED_STRATEGIES = ("fsdp", "smp")
"""Strategies of our own training with a worker; a script brings its own, and may ask for the image of any."""
T = TypeVar("T")

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
    from sm_llm.launcher.planning.input_places import assert_starts_exist

    plans = plan_loaded(load_whole(source, overrides, fields))
    assert_starts_exist(plans)
    return plans


def load_whole(source: Source, overrides: Sequence[Override] = (), fields: Mapping[str, Any] | None = None) -> Loaded:
    """``spec.loading.load``; where the specification is faulty, its ``SpecError`` lists those of the plan as well."""
    from sm_llm.spec.loading.load import InvalidSpec, load

    try:
        return load(source, overrides, fields)
    except InvalidSpec as error:
        raise SpecError([*error.issues, *_beyond(error)]) from None


def _beyond(error: InvalidSpec) -> list[Issue]:
    """Issues of the plan of a faulty specification, at fields that are not reported already."""
    told = {issue.path for issue in error.issues}
    try:
        plan_loaded(error.loaded)
    except (SpecError, PlanError) as further:
        return [issue for issue in further.issues if not any(_overlap(issue.path, path) for path in told)]
    except Exception:  # it may be just what the specification's issues make impossible
        return []
    return []


def _overlap(first: str, second: str) -> bool:
    """Whether one path is the other, or leads to it."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def plan_loaded(loaded: Loaded) -> list[Plan]:
    """``plan`` for a specification that was loaded already; its issues name where each value was written."""
    try:
        if isinstance(loaded.spec, WorkflowSpec):
            return plan_workflow(loaded.spec, loaded.origins)
        return [plan_job(loaded.spec, origins=loaded.origins)]
    except PlanError as error:
        raise PlanError([replace(it, origin=loaded.origins.get(it.path, it.origin)) for it in error.issues]) from None


def plan_workflow(workflow: WorkflowSpec, origins: Mapping[str, str] | None = None) -> list[Plan]:
    """A Plan per step, in the order of the file, which references already obey."""
    from sm_llm.spec.loading.references import resolve, step_dependencies, workflow_job
    from sm_llm.spec.validation.steps import gathered

    plans: list[Plan] = []
    issues: dict[str, tuple[Issue, ...]] = {}
    # Outputs do not exist yet: a reference stays itself, and facts come from the earlier step's own specification.
    outputs = {name: f"steps.{name}.output" for name in workflow.steps}
    tasks = {name: step.task for name, step in workflow.steps.items()}
    upstream = {name: Upstream.of(task) if isinstance(task, PrepareTask) else None for name, task in tasks.items()}
    for name in workflow.steps:
        prefix = f"steps.{name}."
        own = {path.removeprefix(prefix): text for path, text in (origins or {}).items() if path.startswith(prefix)}
        try:
            job = resolve(workflow_job(workflow, name), {}, outputs)
            after = tuple(sorted(step_dependencies(workflow, name), key=list(workflow.steps).index))
            plans.append(plan_job(job, origins=own, upstream=upstream, step=name, after=after))
        except (PlanError, SpecError) as error:
            issues[name] = error.issues
    if issues:
        raise PlanError(list(gathered(workflow, issues)))
    return plans


def plan_job(
    job: JobSpec,
    *,
    origins: Mapping[str, str] | None = None,
    upstream: Mapping[str, Upstream | None] | None = None,
    step: str | None = None,
    after: Sequence[str] = (),
) -> Plan:
    """The Plan of one job. Raises ``PlanError`` with every issue found."""
    from sm_llm.launcher.backends.registry import backend
    from sm_llm.spec.comparison.digest import spec_digest
    from sm_llm.spec.loading.references import resolve

    job = resolve(job, {}, {name: f"steps.{name}.output" for name in upstream or {}})
    world_size = job.compute.world_size
    issues = storage_issues(job)
    numbers = _Numbers()
    if isinstance(job.task, TrainTask):
        numbers = _train_numbers(job.task, job.compute, smallest_gpu(job), upstream or {}, issues)
        if numbers.model is None and job.secrets:
            _forgive_refusals(issues, numbers)
    if isinstance(job.task, PrepareTask):
        issues += check_prepare(job.task)
    if not TASK_KINDS[job.task.kind].starts_ranks and world_size > 1:
        kind = job.task.kind
        others = "other" if world_size == 2 else f"other {world_size - 1}"
        numbers.warnings.append(f"{kind} uses one process; the {others} will have nothing to do")
    plan = Plan(
        job=job,
        digest=spec_digest(job),
        world_size=world_size,
        derived=numbers.derived,
        model=numbers.model,
        rows=numbers.rows,
        memory=numbers.memory,
        warnings=tuple(numbers.warnings),
        step=step,
        after=tuple(after),
        origins=dict(origins or {}),
    )
    checks = backend(job.backend.name).plan_checks(plan)
    follows = isinstance(job.task, TrainTask) and issues and not plan.total_flops
    if found := [*issues, *(_own(checks.issues) if follows else checks.issues)]:
        raise PlanError(found)
    own = (*random_token_warnings(job), *program_warnings(job), *storage_warnings(job))
    warnings = (*plan.warnings, *own, *checks.warnings)
    unsupported = (*_without_worker(job, step), *checks.unsupported)
    return replace(plan, warnings=warnings, target=checks.target, unsupported=unsupported)


def _without_worker(job: JobSpec, step: str | None) -> Iterator[Issue]:
    """The kind of task, or its strategy, where this version has no worker for it."""
    prefix, kind = f"steps.{step}." if step else "", job.task.kind
    remedy = "This version plans and renders it (the verb plan, and fit with --dry-run), but cannot run it"
    if TASK_KINDS[kind].worker is None:
        yield Issue(
            "task-without-worker", f"{prefix}task.kind", f"there is no worker for {kind} tasks yet", kind, remedy
        )
    elif isinstance(job.task, TrainTask) and (strategy := job.task.parallelism.strategy) not in TRAINED_STRATEGIES:
        path = f"{prefix}task.parallelism.strategy"
        yield Issue(
            "strategy-without-worker", path, f"there is no worker for the strategy {strategy} yet", strategy, remedy
        )


def _own(issues: Sequence[Issue]) -> list[Issue]:
    """Without the length of the job that nobody knows: that follows from other issues, and goes with them."""
    return [issue for issue in issues if issue.path != "backend.max_run_seconds" or issue.value]


@dataclass
class _Numbers:
    derived: Derived | None = None
    model: ModelFacts | None = None
    rows: int | None = None
    memory: MemoryEstimate | None = None
    warnings: list[str] = field(default_factory=list)


def _train_numbers(
    task: TrainTask,
    compute: ComputeSpec,
    card: Instance | None,
    upstream: Mapping[str, Upstream | None],
    issues: list[Issue],
) -> _Numbers:
    """Numbers of a training task; what is wrong goes to ``issues``, so that all is reported at once.

    ``card`` is the instance type whose GPUs have the least memory, where all nodes have GPUs.
    """
    numbers, config = _Numbers(), None
    if not is_reference(task.model.path) and not is_reference(pretrained_source(task)):
        config = _collect(issues, lambda: planned_config(task))
    numbers.model = None if config is None else model_facts(config, task)
    if config is not None:
        weights_issues, weights_warnings = check_pretrained(config, task)
        issues += weights_issues
        numbers.warnings += weights_warnings
    found = _rows(task, issues)
    numbers.rows = found.rows if found else None
    numbers.derived = _collect(issues, lambda: derive_task(task, compute.world_size, numbers.rows))
    issues += check_train(task, numbers.model, found, upstream)
    numbers.warnings += train_warnings(task, compute, numbers.derived, numbers.rows)
    numbers.warnings += data_warnings(task, numbers.model, found)
    if config is not None and numbers.derived is not None and not issues and card is not None:
        numbers.memory = memory_estimate(config, task, numbers.derived, compute.processes)
        warning = numbers.memory.warning(card) if numbers.memory else None
        numbers.warnings += [warning] if warning else []
    return numbers


def _forgive_refusals(issues: list[Issue], numbers: _Numbers) -> None:
    """A config that the hub shows to the worker alone, which has the secrets, is not a issue of the plan."""
    for issue in [it for it in issues if it.message.startswith("hf://")]:
        issues.remove(issue)
        numbers.warnings.append(f"{issue}; the worker asks again, with its secrets. Nothing is known of the model here")


def _rows(task: TrainTask, issues: list[Issue]) -> RowsInfo | None:
    """Facts of the training rows where they are a folder on this machine."""
    folder = local_folder(task.data.train) if task.data.format == "rows" else None
    if folder is None or not folder.is_dir():
        return None
    try:
        return describe_rows(folder)
    except DataError as error:
        issues.append(
            Issue("rows-unreadable", "task.data.train", str(error), remedy="Write rows with the prepare task")
        )
        return None


def _collect(issues: list[Issue], compute: Callable[[], T]) -> T | None:
    try:
        return compute()
    except (SpecError, PlanError) as error:
        issues += error.issues or (Issue("task-not-computable", "task", str(error)),)
        return None
