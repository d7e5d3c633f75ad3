"""Checks, before anything is written, that a checkpoint can be continued by the job that is about to be launched."""

from __future__ import annotations

from dataclasses import replace
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
from sm_llm.errors import CheckpointError, DataError, PlanError, SmLlmError, StorageError
from sm_llm.launcher.planning.local_paths import is_reference, local_folder
from sm_llm.spec.field_classes import FieldClass
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.training import CheckpointStart, JsonRowsData, RowsData, StreamData, SyntheticData
from sm_llm.storage.uri import is_s3, open_store, run_and_step
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sm_llm.contract.identity import Identity
    from sm_llm.errors import Issue
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.spec.training import DataSpec
    from sm_llm.storage.base import Store


def assert_continues(
    run: RunHandle, plans: Iterable[Plan], step: int | None = None, *, changes: Sequence[str] = (), by_fit: bool = False
) -> list[str]:
    """Raise ``PlanError`` if a run's own checkpoint, the newest or that of ``step``, is of another model, data order or
    schedule than ``plans`` ask for, or of a later step. What only the job can see is left to its worker.

    Returns what to print once the attempt has begun: with which changes it continues, and what could not be compared.
    ``changes`` were asked for, by ``fit`` or (``by_fit`` is false) by ``resume``: the ways out that are printed repeat
    them.
    """
    ways = WaysOut(run.uri, changes, by_fit)
    own = run.steps
    issues: list[Issue] = []
    notes: list[str] = []
    for plan in plans:
        job = run if plan.step is None else own.get(plan.step)
        if job is not None:
            found = _issues(plan, job.run_store.store, job.id, step, ways, notes, is_own=True)
            prefix = f"steps.{plan.step}." if plan.step else ""
            issues += [replace(issue, path=f"{prefix}{issue.path}") for issue in found]
    _refuse(issues, plans)
    return notes


def assert_starts(plans: Sequence[Plan], *, remote: bool | None = None) -> list[str]:
    """The same for checkpoints of other runs that jobs start from (``task.start.checkpoint``).

    ``remote``: only those in S3, or only those on this machine.
    """
    issues: list[Issue] = []
    notes: list[str] = []
    for plan in plans:
        task, prefix = plan.job.task, f"steps.{plan.step}." if plan.step else ""
        if not isinstance(task, TrainTask) or not isinstance(task.start, CheckpointStart):
            continue
        location, step = run_and_step(task.start.checkpoint)
        if is_reference(task.start.checkpoint):
            notes.append(
                f"{prefix}task.start.checkpoint: {location} is not there yet, the job compares it with its model"
            )
        elif remote in (None, is_s3(location)):
            store = open_store(location, plan.job.storage_options.model_dump())
            found = _issues(plan, store, None, step, WaysOut(location), notes, is_own=False)
            issues += [replace(issue, path=f"{prefix}{issue.path}") for issue in found]
    _refuse(issues, plans)
    return notes


def compare_starts(plans: Sequence[Plan], *, remote: bool) -> None:
    """``assert_starts`` where nothing is started: what could not be compared goes to standard error at once."""
    echo(*assert_starts(plans, remote=remote), err=True)


def _refuse(issues: list[Issue], plans: Iterable[Plan]) -> None:
    origins = {path: origin for plan in plans for path, origin in plan.origins.items()}
    if issues:
        raise PlanError([replace(it, origin=origins.get(it.path, it.origin)) for it in issues])


def _issues(
    plan: Plan, store: Store, run_id: str | None, step: int | None, ways: WaysOut, notes: list[str], *, is_own: bool
) -> list[Issue]:
    task = plan.job.task
    if not isinstance(task, TrainTask):
        return []
    try:
        meta = _meta(store, run_id, step)
        if meta is None:
            return []
        now = planned_identity(plan, task)
    # The job's role may read what this user may not, so this is no reason to refuse the launch.
    except StorageError as error:
        reported = "the checkpoint cannot be compared from here, the job does so when it starts"
        notes.append(f"{store.uri}: {reported}: {error}")
        return []
    found = differences(recorded_identity(meta[1]), now)
    if found and not plan.job.backend.runs_here:  # of a local run the worker's own notice is seen at once
        notes.append(f"continues with changes: {'; '.join(map(str, found))}")
    total = None if plan.derived is None else plan.derived.total_steps
    # A length that the checkpoint has passed explains differences of the schedule, which are not listed beside it.
    own = recorded_identity(meta[1]) if is_own else None
    if (too_short := length_issue(task, total, meta[0], may_equal=is_own, own=own)) is not None:
        found = [it for it in found if it.field_class is not FieldClass.SCHEDULE]
    issues = refusals(
        found,
        now,
        meta[0],
        ways,
        is_own=is_own,
        allow_other_data=isinstance(task.start, CheckpointStart) and task.start.allow_other_data,
        is_stated=task.optim.schedule_steps is not None,
    )
    return [too_short, *issues] if too_short else issues


def _meta(store: Store, run_id: str | None, step: int | None) -> tuple[int, dict[str, object]] | None:
    from sm_llm.storage.publication.publish import find_newest

    try:
        commit = find_newest(store, run_id=run_id, allow_step=None if step is None else lambda it: it == step).commit
    except CheckpointError:  # none can be used: the worker reports it with the remedy
        return None
    return None if commit is None else (commit.step or 0, commit.meta)


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
