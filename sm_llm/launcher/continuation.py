"""Checks, before anything is written, that a checkpoint can be continued by the job that is about to be launched."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sm_llm.contract.identity import (
    DATA_CONTENT,
    TOKENIZER_CONTENT,
    WaysOut,
    differences,
    identity,
    length_issue,
    recorded_identity,
    refusals,
)
from sm_llm.errors import CheckpointError, DataError, Issue, SmLlmError, StorageError
from sm_llm.launcher.planning.local_paths import is_reference, local_folder
from sm_llm.spec.comparison.leaves import spec_differences
from sm_llm.spec.field_classes import FieldClass
from sm_llm.spec.tasks import ScriptTask, TrainTask
from sm_llm.spec.training import CheckpointStart, JsonRowsData, RowsData, StreamData, SyntheticData
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.storage.uri import is_s3, open_store, run_and_step
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sm_llm.contract.identity import Identity
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.spec.job import JobSpec, WorkflowSpec
    from sm_llm.spec.loading.load import Loaded
    from sm_llm.spec.training import DataSpec
    from sm_llm.spec.validation.runner import Checker
    from sm_llm.storage.base import Store


@dataclass(frozen=True)
class Continued:
    """Jobs that are about to continue checkpoints."""

    plans: Sequence[Plan]
    run: RunHandle | None = None
    """The run whose own checkpoints they continue; else they start from those of other runs."""
    step: int | None = None
    """Of the run's own checkpoint, where it is not the newest."""
    changes: Sequence[str] = ()
    by_fit: bool = False
    """Whether ``fit`` asks for the changes, and not ``resume``: the ways out that are printed repeat them."""
    remote: bool | None = None
    """Whether to compare only checkpoints in S3, or only those on this machine."""
    notes: list[str] = field(default_factory=list)
    """What to print once they have begun: with which changes jobs continue, and what could not be compared."""
    starts: dict[str, str] = field(default_factory=dict)
    """Step of the workflow (empty for a job) -> where its training or program starts, in words."""


def assert_continues(
    handle: RunHandle, plans: Sequence[Plan], step: int | None = None, *, changes: Sequence[str] = (),
    by_fit: bool = False,
) -> Continued:  # fmt: skip
    """Raise ``PlanError`` if a run's own checkpoint, the newest or that of ``step``, is of another model, data order or
    schedule than ``plans`` ask for, or of a later step. What only the job can see is left to its worker.

    Returns what is known of the attempt before it begins: ``Continued.notes``, ``Continued.starts``.
    """
    continued = Continued(plans, handle, step, changes, by_fit)
    refuse(run(CONTINUATION_CHECKERS, continued))
    return continued


def assert_starts(plans: Sequence[Plan], *, remote: bool | None = None) -> list[str]:
    """The same for checkpoints of other runs that jobs start from (``task.start.checkpoint``).

    ``remote``: only those in S3, or only those on this machine.
    """
    continued = Continued(plans, remote=remote)
    refuse(run(CONTINUATION_CHECKERS, continued))
    return continued.notes


def compare_starts(plans: Sequence[Plan], *, remote: bool) -> None:
    """``assert_starts`` where nothing is started: what could not be compared goes to standard error at once."""
    echo(*assert_starts(plans, remote=remote), err=True)


def check_own_checkpoints(it: Continued) -> Iterator[Issue]:
    """A run's own checkpoints that its jobs cannot continue."""
    if it.run is None:
        return
    ways, own = WaysOut(it.run.uri, it.changes, it.by_fit), it.run.steps
    for plan in it.plans:
        job = it.run if plan.step is None else own.get(plan.step)
        if job is None or not isinstance(plan.job.task, TrainTask | ScriptTask):
            continue
        checkpoint = _Checkpoint(job.run_store.store, job.id, it.step)
        yield from _of_plan(plan, _issues(plan, checkpoint, ways, it.notes, is_own=True))
        if checkpoint.done is not None:
            it.starts[plan.step or ""] = f"this run's checkpoint of step {checkpoint.done}"


def check_checkpoints_to_start_from(it: Continued) -> Iterator[Issue]:
    """Checkpoints of other runs that jobs cannot start from."""
    for plan in it.plans if it.run is None else ():
        task = plan.job.task
        if not isinstance(task, TrainTask) or not isinstance(task.start, CheckpointStart):
            continue
        location, step = run_and_step(task.start.checkpoint)
        if is_reference(task.start.checkpoint):
            path = f"{f'steps.{plan.step}.' if plan.step else ''}task.start.checkpoint"
            it.notes.append(f"{path}: {location} is not there yet, the job compares it with its model")
        elif it.remote in (None, is_s3(location)):
            store = open_store(location, plan.job.storage_options.model_dump())
            checkpoint = _Checkpoint(store, None, step)
            yield from _of_plan(plan, _issues(plan, checkpoint, WaysOut(location), it.notes, is_own=False))


def _of_plan(plan: Plan, found: Iterable[Issue]) -> Iterator[Issue]:
    """Issues of a plan's job by their paths in the workflow that it may be a step of, with the origins of values."""
    prefix = f"steps.{plan.step}." if plan.step else ""
    for it in found:
        yield replace(it, path=f"{prefix}{it.path}", origin=plan.origins.get(it.path, it.origin))


CONTINUATION_CHECKERS: tuple[Checker[Continued], ...] = (check_own_checkpoints, check_checkpoints_to_start_from)


@dataclass(frozen=True)
class ChangedRun:
    """A run whose next attempt is asked for with changes."""

    run: RunHandle
    before: JobSpec | WorkflowSpec
    loaded: Loaded
    """The specification with the changes."""
    given: Sequence[str]
    """The changes as they were typed."""


def check_changes(it: ChangedRun) -> Iterator[Issue]:
    """Changes that a further attempt would not heed: of a run's start, name and storage, and of all of a workflow's
    step that has its result."""
    before, after = it.before, it.loaded.spec
    # Two calls, because a comparison gives either the values that make another specification or the free ones.
    found = [*spec_differences(before, after), *spec_differences(before, after, only_free=True)]
    done = tuple(f"steps.{name}." for name, step in it.run.steps.items() if step.result is not None)
    anew = f"Leave it out, or begin another run: sm-llm rerun {quoted(it.run.uri, *it.given)}"
    for change in found:
        # What it was before goes with the value that takes its place, and what nobody wrote is the default of a block
        # that is reported by what was written in it.
        if not change.is_settable or change.name not in it.loaded.origins:
            continue
        if change.field_class is FieldClass.START:
            problem = "has no effect on a run that has a checkpoint"
        elif change.field_class is FieldClass.RUN:
            problem = "has no effect on a run that exists"
        elif change.name.startswith(done):
            problem = "has no effect: this step has its result"
        else:
            continue
        origin = it.loaded.origins.get(change.name, "")
        yield Issue("argument-without-effect-on-run", change.name, problem, change.now, anew, origin)


CHANGE_CHECKERS: tuple[Checker[ChangedRun], ...] = (check_changes,)


def assert_changes_apply(changed: ChangedRun) -> None:
    """Raise ``PlanError`` for changes that a further attempt would not heed."""
    refuse(run(CHANGE_CHECKERS, changed))


@dataclass
class _Checkpoint:
    """The checkpoint that a job continues from: the newest of a store, or that of ``step``."""

    store: Store
    run_id: str | None
    step: int | None
    done: int | None = None
    """Its step, once it was read; None where there is none."""

    def read(self) -> Identity | None:
        """What it is a state of; None where there is no usable one, which the worker reports with the remedy."""
        from sm_llm.storage.publication.publish import find_newest

        step = self.step
        allowed = None if step is None else lambda it: it == step
        try:
            commit = find_newest(self.store, run_id=self.run_id, allow_step=allowed).commit
        except CheckpointError:
            return None
        if commit is None:
            return None
        self.done = commit.step or 0
        return recorded_identity(commit.meta)


def _issues(plan: Plan, checkpoint: _Checkpoint, ways: WaysOut, notes: list[str], *, is_own: bool) -> list[Issue]:
    task = plan.job.task
    try:
        before = checkpoint.read()
        if before is None or checkpoint.done is None or not isinstance(task, TrainTask):
            return []
        now = planned_identity(plan, task)
    # The job's role may read what this user may not, so this is no reason to refuse the launch.
    except StorageError as error:
        reported = "the checkpoint cannot be compared from here, the job does so when it starts"
        notes.append(f"{checkpoint.store.uri}: {reported}: {error}")
        return []
    found = differences(before, now)
    # Printed also where the worker's own notice is seen soon: it comes after torch is loaded, or not at all.
    if found:
        notes.append(f"continues with changes: {'; '.join(map(str, found))}")
    total = None if plan.derived is None else plan.derived.total_steps
    # A length that the checkpoint has passed explains differences of the schedule, which are not listed beside it.
    own = before if is_own else None
    if (too_short := length_issue(task, total, checkpoint.done, may_equal=is_own, own=own)) is not None:
        found = [it for it in found if it.field_class is not FieldClass.SCHEDULE]
    issues = refusals(
        found,
        now,
        checkpoint.done,
        ways,
        is_own=is_own,
        allow_other_data=isinstance(task.start, CheckpointStart) and task.start.allow_other_data,
        is_stated=task.optim.schedule_steps is not None,
    )
    return [too_short, *issues] if too_short else issues


def planned_identity(plan: Plan, task: TrainTask) -> Identity:
    """What a checkpoint of the planned training would be a state of, as far as this machine knows."""
    from sm_llm.launcher.planning.model_facts import planned_config

    try:
        config = planned_config(task) if plan.model is not None else None
    except SmLlmError:  # of the hub, which the job may reach
        config = None
    rows = task.data.rows if isinstance(task.data, SyntheticData) else plan.rows
    return identity(task, config, plan.derived, contents=_contents(task), rows=rows)


def _contents(task: TrainTask) -> dict[str, str | None]:
    """Digests of what lies on this machine; of random tokens and of no tokenizer there is none to compare."""
    from sm_llm.data.content import data_digest, tokenizer_digest

    found: dict[str, str | None] = {}
    data = _local_data(task.data)
    tokenizer = local_folder(task.tokenizer)
    try:
        if data is not None:
            found[DATA_CONTENT] = data_digest(data)
        if task.tokenizer is None or (tokenizer is not None and tokenizer.is_dir()):
            found[TOKENIZER_CONTENT] = tokenizer_digest(None if tokenizer is None else str(tokenizer))
    except DataError as error:
        raise StorageError(str(error)) from error
    return found


def _local_data(data: DataSpec) -> DataSpec | None:
    """The data with its place on this machine, or None where its content cannot be read from here."""
    if isinstance(data, RowsData | JsonRowsData):
        folder = local_folder(data.train)
        return None if folder is None or not folder.is_dir() else data.model_copy(update={"train": str(folder)})
    return None if isinstance(data, StreamData) and data.data_files is not None else data
