"""Finds the unfinished run that a launch continues, or that it must not pass over in silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import LaunchRefused, SpecError
from sm_llm.launcher.find_runs import differences_to, run_records
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
    from collections.abc import Sequence

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


def find_unfinished(storage: str, loaded: Loaded) -> EarlierRun:
    """The newest unfinished run below ``storage`` of the same name and specification.

    A value that changes nothing in the result (``FieldClass.FREE``) makes no other specification; where such values
    differ, the run continues with the new ones.

    Raises ``UnfinishedRun`` if the newest run of this name is unfinished and of another specification, unless it has
    nothing to continue from.
    """
    options = S3Options(**loaded.spec.storage_options.model_dump())
    found = [it for it in run_records(storage, f"{loaded.spec.name}-", options) if it[1].name == loaded.spec.name]
    newest_first = sorted(found, key=lambda it: (it[1].created, it[1].run_id), reverse=True)
    # A run of this very specification is continued even if a newer one of the name has another specification.
    for run_store, record in newest_first:
        if differences_to(record, loaded) == [] and not Run(run_store).state.is_completed:
            return EarlierRun(Run(run_store), _free_changes(record, loaded))
    return EarlierRun(left_behind=_refuse_beside(*newest_first[0], loaded) if newest_first else "")


def _free_changes(record: RunRecord, loaded: Loaded) -> tuple[str, ...]:
    if record.spec_digest == loaded.digest:
        return ()
    named = spec_differences(record.load_spec(), loaded.spec, only_free=True)
    settable = (it for it in named if it.is_settable and it.field_class is not FieldClass.RUN)
    return tuple(f"{it.name}={to_typed(it.now)}" for it in settable)


def _refuse_beside(run_store: RunStore, record: RunRecord, loaded: Loaded) -> str:
    run = Run(run_store)
    state = run.state
    if state.is_completed:
        return ""
    found = differences_to(record, loaded)
    if found == []:
        return ""
    step = max((it.step for it in run.checkpoints() if it.valid), default=None)
    done = [name for name, it in run.steps.items() if it.result is not None]
    # Nothing was saved and nothing runs, so a new run beside it loses no work.
    if step is None and not done and state.is_final:
        return f"{run.id} is {state.value}, without a checkpoint, and of another specification: this is a new run"
    raise UnfinishedRun(run, _text(run, state, step, found, loaded, done))


def _text(
    run: Run, state: RunState, step: int | None, found: Sequence[Difference] | None, loaded: Loaded, done: Sequence[str]
) -> str:
    """``done``: steps of a workflow that have their result, and take no changes any more."""
    at = "" if step is None else f" at step {step}"
    lines = [f"{run.id} is unfinished ({state.value}){at}, and this specification differs from its own:"]
    lines += [f"  - {it}" for it in found] if found is not None else ["  - another release wrote its record"]
    if not state.is_final:
        lines.append(f"Stop it first:                sm-llm stop {quoted(run.uri)}")
    lines.append(f"Continue it as it is:         sm-llm resume {quoted(run.uri)}")
    is_done = any(it.name.startswith(f"steps.{name}.") for it in found or () for name in done)
    is_never = found is None or is_done or bool({it.field_class for it in found} & _NEVER_CONTINUED)
    if found is not None and not is_never and not _is_passed(loaded, step):
        changes = [f"{it.name}={to_typed(it.now)}" for it in found if it.is_settable]
        lines.append(f"Continue it with the changes: sm-llm resume {quoted(run.uri, *changes)}")
    lines.append("Begin another run:            the same command with --new (in Python: new=True)")
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
