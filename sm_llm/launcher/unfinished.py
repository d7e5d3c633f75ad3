"""Finds the unfinished run that a launch continues, or that it must not pass over in silence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sm_llm.errors import LaunchRefused, SpecError
from sm_llm.launcher.continuation import assert_continues
from sm_llm.launcher.find_runs import SHOWN_RUNS, differences_to, run_records
from sm_llm.launcher.run import Run
from sm_llm.spec.comparison.leaves import spec_differences
from sm_llm.spec.derive import derive_task
from sm_llm.spec.field_classes import FieldClass
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_states import RunState
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.comparison.leaves import Difference
    from sm_llm.spec.loading.load import Loaded

# Classes of which a run keeps what it began with.
_NEVER_CONTINUED = frozenset({FieldClass.MODEL, FieldClass.ORDER, FieldClass.START, FieldClass.WORK})


class UnfinishedRun(LaunchRefused):
    """A launch would begin from zero beside an unfinished run of the same name and of another specification."""

    def __init__(self, run: Run, text: str) -> None:
        super().__init__(text)
        self.run = run


@dataclass(frozen=True)
class EarlierRun:
    """What a launch meets below its storage."""

    run: Run | None = None
    """The run that it continues."""
    changes: tuple[str, ...] = ()
    """The free values that the run gets (``key.path=value``)."""
    left_behind: str = ""
    """Of which run nothing is continued, in words, to print once the new run has begun."""


@dataclass(frozen=True)
class _Unfinished:
    """A run of the name that has no result, and of another specification."""

    run: Run
    state: RunState
    found: Sequence[Difference] | None
    """What differs; None where another release wrote its record."""
    step: int | None
    """Of its newest usable checkpoint."""
    done: Sequence[str]
    """Steps of a workflow that have their result, and take no changes any more."""

    @classmethod
    def of(cls, run_store: RunStore, record: RunRecord, loaded: Loaded) -> _Unfinished | None:
        # The record first: of a run that has its result nothing else needs to be read.
        if record.outcome is not None and record.outcome.is_completed:
            return None
        run = Run(run_store)
        if (state := run.state).is_completed:
            return None
        step = max((it.step for it in run.checkpoints() if it.valid), default=None)
        done = [name for name, it in run.steps.items() if it.result is not None]
        return cls(run, state, differences_to(record, loaded), step, done)

    @property
    def has_work(self) -> bool:
        """Whether something was saved, or is being computed: what a new run beside it would compute again."""
        return self.step is not None or bool(self.done) or not self.state.is_final


def find_unfinished(storage: str, loaded: Loaded) -> EarlierRun:
    """The newest unfinished run below ``storage`` of the same name and specification.

    A value that changes nothing in the result (``FieldClass.FREE``) makes no other specification; where such values
    differ, the run continues with the new ones.

    Raises ``UnfinishedRun`` if any run of this name, however many newer ones there are, is unfinished and of another
    specification, unless it has nothing to continue from.
    """
    options = S3Options(**loaded.spec.storage_options.model_dump())
    found = [it for it in run_records(storage, f"{loaded.spec.name}-", options) if it[1].name == loaded.spec.name]
    newest_first = sorted(found, key=lambda it: (it[1].created, it[1].run_id), reverse=True)
    # A run of this very specification is continued even if a newer one of the name has another specification.
    for run_store, record in newest_first:
        if differences_to(record, loaded) == [] and not Run(run_store).state.is_completed:
            return EarlierRun(Run(run_store), _free_changes(record, loaded))
    left_behind = ""
    for run_store, record in newest_first:
        unfinished = _Unfinished.of(run_store, record, loaded)
        if unfinished is None:
            continue
        if unfinished.has_work:
            others = [it.run_id for _, it in newest_first if it.outcome is None and it.run_id != record.run_id]
            raise UnfinishedRun(unfinished.run, _text(unfinished, loaded, others))
        # Nothing was saved and nothing runs, so a new run beside it loses no work.
        if record is newest_first[0][1]:
            why = "without a checkpoint, and of another specification: this is a new run"
            left_behind = f"{record.run_id} is {unfinished.state.value}, {why}"
    return EarlierRun(left_behind=left_behind)


@dataclass(frozen=True)
class Foreseen:
    """What ``fit`` would do, for a plan or a dry run, which start nothing."""

    words: str = ""
    run: Run | None = None
    """The run that it would continue."""
    starts: Mapping[str, str] = field(default_factory=dict)
    """Step of the workflow (empty for a job) -> where it would start, in words, where that is a checkpoint."""


def foresee(storage: str, loaded: Loaded, plans: Sequence[Plan]) -> Foreseen:
    """What ``fit`` would do beside the unfinished runs below ``storage``: where it would refuse, a plan is that of a
    new run, as with ``--new``.

    Raises ``PlanError`` where the run that it would continue has a checkpoint of another model, order or schedule.
    """
    try:
        found = find_unfinished(storage, loaded)
    except UnfinishedRun as refusal:
        return Foreseen(f"fit would start nothing beside an unfinished run. {refusal}")
    if found.run is None:
        return Foreseen(found.left_behind)
    run, state = found.run, found.run.state
    if not state.is_final:
        words = f"fit would start nothing: {run.id} is {state.value} already, with this specification"
        return Foreseen(f"{words}. Follow it with: sm-llm logs -f {quoted(run.uri)}, or add --new")
    continued = assert_continues(run, plans, changes=found.changes, by_fit=True)
    starts = ", ".join(dict.fromkeys(continued.starts.values())) or "the beginning: it has no checkpoint"
    words = f"fit would continue {run.id} ({state.value}) as attempt {run.record.next_attempt}, from {starts}"
    return Foreseen("\n".join([f"{words}; --new starts another run", *continued.notes]), run, continued.starts)


def _free_changes(record: RunRecord, loaded: Loaded) -> tuple[str, ...]:
    if record.spec_digest == loaded.digest:
        return ()
    named = spec_differences(record.load_spec(), loaded.spec, only_free=True)
    settable = (it for it in named if it.is_settable and it.field_class is not FieldClass.RUN)
    return tuple(f"{it.name}={to_typed(it.now)}" for it in settable)


def _text(it: _Unfinished, loaded: Loaded, others: Sequence[str]) -> str:
    """``others``: further runs of the name that have not ended with a result."""
    run, found, at = it.run, it.found, "" if it.step is None else f" at step {it.step}"
    lines = [f"{run.id} is unfinished ({it.state.value}){at}, and this specification differs from its own:"]
    lines += [f"  - {each}" for each in found] if found is not None else ["  - another release wrote its record"]
    if not it.state.is_final:
        lines.append(f"Stop it first:                sm-llm stop {quoted(run.uri)}")
    lines.append(f"Continue it as it is:         sm-llm resume {quoted(run.uri)}")
    is_done = any(each.name.startswith(f"steps.{name}.") for each in found or () for name in it.done)
    is_never = found is None or is_done or bool({each.field_class for each in found} & _NEVER_CONTINUED)
    if found is not None and not is_never and not _is_passed(loaded, it.step):
        changes = [f"{each.name}={to_typed(each.now)}" for each in found if each.is_settable]
        lines.append(f"Continue it with the changes: sm-llm resume {quoted(run.uri, *changes)}")
    lines.append("Begin another run:            the same command with --new (in Python: new=True)")
    if others:
        lines.append(f"Not finished as well: {', '.join(others[:SHOWN_RUNS])}")
    return "\n".join(lines)


def _is_passed(loaded: Loaded, step: int | None) -> bool:
    """Whether a checkpoint of ``step`` has done more than the specification asks for, as far as that is known here."""
    spec = loaded.spec
    if step is None or not isinstance(spec, JobSpec) or not isinstance(spec.task, TrainTask):
        return False
    try:
        total = derive_task(spec.task, spec.compute.world_size, None).total_steps
    except SpecError:  # it is reported when the job is planned
        return False
    return total is not None and total < step
