"""What a checkpoint is a state of: model, data order and everything else that decides what training computes.

Every commit of a checkpoint carries its identity (``meta["identity"]``): class -> name -> value, in the classes of
``spec.comparison.classes``. A field whose value leads to something else is there as what it led to: the resolved
config of the model, the digest of the data, the number of steps. Launcher and worker compare by it before anything is
continued.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, SpecError
from sm_llm.models.families.table import family
from sm_llm.spec.comparison.leaves import Difference, leaves
from sm_llm.spec.field_classes import FieldClass
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.spec.tasks import open_settings
from sm_llm.terminal import counted, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from sm_llm.spec.derive import Derived
    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.spec.tasks import TrainTask

Identity = dict[str, dict[str, Any]]

IDENTITY = "identity"
"""The key in a commit's ``meta``."""
DATA_CONTENT = "task.data.train (content)"
TOKENIZER_CONTENT = "task.tokenizer (content)"
ROWS = "task.data (number of rows)"
TOTAL_STEPS, SCHEDULE_STEPS, WARMUP_STEPS = "total_steps", "task.optim.schedule_steps", "task.optim.warmup_steps"
_SCHEDULE = "task.optim.schedule"
# Schedules that do not depend on how many steps there are.
_UNBOUNDED = ("constant", "plateau")
_CONFIG = "task.model.config."
# Fields of a model's config that no step of a training depends on.
_INERT = frozenset({"architectures", "dtype", "use_cache", "bos_token_id", "eos_token_id"})
# Those that only the drawing of initial weights reads.
_OF_FIRST_WEIGHTS = frozenset({"initializer_range"})
_COMPARED = frozenset(FieldClass) - {FieldClass.FREE, FieldClass.RUN, FieldClass.START, FieldClass.WORK}
# Name in the fingerprint of checkpoints that carry no identity -> class and name here. The others are degrees.
_OLD_NAMES = {
    "total_steps": (FieldClass.SCHEDULE, TOTAL_STEPS),
    "schedule_steps": (FieldClass.SCHEDULE, SCHEDULE_STEPS),
    "warmup_steps": (FieldClass.SCHEDULE, WARMUP_STEPS),
    "schedule": (FieldClass.SCHEDULE, _SCHEDULE),
    "learning_rate": (FieldClass.SCHEDULE, "task.optim.learning_rate"),
    "min_learning_rate": (FieldClass.SCHEDULE, "task.optim.min_learning_rate"),
    "decay_fraction": (FieldClass.SCHEDULE, "task.optim.decay_fraction"),
    "global_batch_size": (FieldClass.ORDER, "task.global_batch_size"),
    "seq_length": (FieldClass.ORDER, "task.data.seq_length"),
    "rows": (FieldClass.ORDER, ROWS),
    "seed": (FieldClass.ORDER, "task.seed"),
    "compute": (FieldClass.PRECISION, "task.precision.compute"),
}


def identity(
    task: TrainTask,
    config: Mapping[str, Any] | None,
    derived: Derived | None,
    layout: Layout | None = None,
    *,
    contents: Mapping[str, str | None],
    rows: int | None,
) -> Identity:
    """The identity of a training.

    Args:
        task: the task; of its fields the resolved ones are left to the other arguments.
        config: the model's canonical config, or None where it is not known yet.
        derived: the derived numbers, or None. A number that is None in it is not known yet.
        layout: the degrees of parallelism.
        contents: ``DATA_CONTENT`` and ``TOKENIZER_CONTENT`` -> digest, as far as they are known.
        rows: training rows, or None for a stream, or where they are not known yet.
    """
    found: Identity = {kind: {} for kind in sorted(_COMPARED)}
    for leaf in leaves(task, "task"):
        if leaf.declared and leaf.declared.field_class in _COMPARED and not leaf.declared.is_resolved:
            found[leaf.declared.field_class][leaf.path] = leaf.value
    if task.precision.compute == "auto":
        del found[FieldClass.PRECISION]["task.precision.compute"]
    for name in open_settings(task):  # the worker chooses them
        for values in found.values():
            values.pop(f"task.{name}", None)
    for name, it in (config or {}).items():
        if name not in _INERT:
            kind = FieldClass.START if name in _OF_FIRST_WEIGHTS else FieldClass.MODEL
            found.setdefault(kind, {})[f"{_CONFIG}{name}"] = it
    found[FieldClass.ORDER] |= contents
    if rows is not None:
        found[FieldClass.ORDER][ROWS] = rows
    if derived is not None:
        _add_derived(found, derived)
    if layout is not None:
        found[FieldClass.PLACEMENT] |= layout.degrees()
    # As it is read back from a commit: tuples are lists and enums are text, so that both compare equal.
    plain: Identity = json.loads(json.dumps(found))
    return plain


def _add_derived(found: Identity, derived: Derived) -> None:
    found[FieldClass.ORDER]["task.global_batch_size"] = derived.global_batch_size
    steps = {
        TOTAL_STEPS: derived.total_steps,
        SCHEDULE_STEPS: derived.schedule_steps or derived.total_steps,
        WARMUP_STEPS: derived.warmup_steps,
    }
    if derived.total_steps is not None:
        found[FieldClass.SCHEDULE] |= steps


def recorded_identity(meta: Mapping[str, Any]) -> Identity:
    """The identity in a commit's ``meta``; of a checkpoint that has none, what its fingerprint (``job``) holds.

    What has another form is not known here: the worker, which restores the checkpoint, refuses it.
    """
    if isinstance(recorded := meta.get(IDENTITY), dict):
        return {kind: values for kind, values in recorded.items() if isinstance(values, dict)}
    found: Identity = {}
    job = meta.get("job")
    for name, value in job.items() if isinstance(job, dict) else ():
        kind, own = _OLD_NAMES.get(name, (FieldClass.PLACEMENT, name))
        found.setdefault(kind, {})[own] = value
    return found


def differences(before: Identity, now: Identity) -> list[Difference]:
    """Every value that both know and that differs, the classes that matter most first.

    A field of a model's config that only one of the two states is compared with what the other computes with.
    """
    first, second = _with_fields_of(before, now), _with_fields_of(now, before)
    return [
        Difference(FieldClass(kind), name, value, second[kind][name])
        for kind in FieldClass
        for name, value in first.get(kind, {}).items()
        if name in second.get(kind, {}) and second[kind][name] != value
    ]


def _with_fields_of(own: Identity, other: Identity) -> Identity:
    """``own`` with each field of a config that ``other`` states and that its own canonical form leaves out."""
    values = own.get(FieldClass.MODEL, {})
    config = {name.removeprefix(_CONFIG): it for name, it in values.items() if name.startswith(_CONFIG)}
    try:
        kind = family(config)
    except SpecError:  # no config is known, or one of a family that this release does not have
        return own
    asked = (name.removeprefix(_CONFIG) for name in other.get(FieldClass.MODEL, {}) if name.startswith(_CONFIG))
    left_out = {f"{_CONFIG}{name}": kind.in_effect(config, name) for name in asked if name not in config}
    return {**own, FieldClass.MODEL: {**values, **left_out}}


@dataclass(frozen=True)
class WaysOut:
    """The commands by which a run whose checkpoint cannot be continued like this is left behind, as they are typed."""

    run: str
    """Address of the run that saved the checkpoint."""
    changes: Sequence[str] = ()
    """The changes that were asked for, ``key.path=value``."""
    by_fit: bool = False
    """Whether ``fit`` asked: then the same command begins another run."""

    @property
    def anew(self) -> str:
        """Begin another run from its beginning."""
        return "the same command with --new" if self.by_fit else f"sm-llm rerun {quoted(self.run, *self.changes)}"

    @property
    def with_other_data(self) -> str:
        """Train on from the checkpoint with other data."""
        return f"sm-llm branch {quoted(self.run, *self.changes, 'task.start.allow_other_data=true')}"


def refusals(
    found: Iterable[Difference],
    now: Identity,
    step: int,
    ways: WaysOut,
    *,
    is_own: bool,
    allow_other_data: bool,
    is_stated: bool,
) -> list[Issue]:
    """Why a checkpoint of ``step`` cannot be continued with these differences; each issue with the ways out.

    ``is_own``: by the run that saved it. Its schedule may change its length only where ``task.optim.schedule_steps``
    states it (``is_stated``). ``allow_other_data``: as ``start.allow_other_data`` asks.
    """
    listed = list(found)
    issues = [_model_issue(it, step, ways, is_own=is_own) for it in listed if it.field_class is FieldClass.MODEL]
    issues += [_start_issue(it, step, ways, is_own=is_own) for it in listed if it.field_class is FieldClass.START]
    if is_own or not allow_other_data:
        order = [it for it in listed if it.field_class is FieldClass.ORDER]
        issues += [_order_issue(it, step, ways, is_own=is_own) for it in order]
    if is_own and not is_stated and (issue := _schedule_issue(listed, now, step)) is not None:
        issues.append(issue)
    return issues


def length_issue(
    task: TrainTask, total_steps: int | None, step: int, *, may_equal: bool, own: Identity | None = None
) -> Issue | None:
    """Why a checkpoint of ``step`` leaves nothing to do for a training of ``total_steps`` in all; None if it does not.

    ``may_equal``: a checkpoint of the very last step is good, its model is published as it is. ``own`` is the identity
    of a checkpoint of the run itself, whose schedule the remedy keeps.
    """
    if total_steps is None or step < total_steps or (may_equal and step == total_steps):
        return None
    lengths = {"max_steps": task.max_steps, "max_tokens": task.max_tokens, "max_epochs": task.max_epochs}
    name, value = next((name, value) for name, value in lengths.items() if value is not None)
    problem = (
        f"asks for {counted(total_steps, 'step')} in all; the checkpoint has done {step}: nothing is left to train"
    )
    # ``value`` may count tokens or epochs: converted at the rate of ``total_steps`` steps for ``value``, rounded up.
    longer = -(-2 * step * value // total_steps)  # at least twice what is done
    steps = "" if name == "max_steps" else f", which gives more than {counted(step, 'step')}"
    course = _kept_course(task, own or {})
    remedy = (
        f"Ask for more, counted from step 0: task.{name}={longer}{course}{steps}; or begin with an earlier checkpoint"
    )
    return Issue("checkpoint-already-at-length", f"task.{name}", problem, value, remedy)


def _kept_course(task: TrainTask, own: Identity) -> str:
    """What to type beside another length, so that the schedule of a run's own checkpoint stays as it is."""
    span = own.get(FieldClass.SCHEDULE, {}).get(SCHEDULE_STEPS)
    depends = task.optim.schedule not in _UNBOUNDED or bool(task.optim.warmup_fraction)
    return f" {SCHEDULE_STEPS}={span}" if span and depends and task.optim.schedule_steps is None else ""


def _model_issue(it: Difference, step: int, ways: WaysOut, *, is_own: bool) -> Issue:
    of = f"was {to_typed(it.before)} when the checkpoint was saved"
    if is_own:
        problem = f"{of} (step {step} of {ways.run}): it is a state of another model"
        anew = f"begin another run: {ways.anew}; task.start.pretrained=FOLDER begins it with published weights"
    else:
        problem = f"{of} that this run starts from (step {step} of {ways.run}): it is a state of another model"
        anew = "begin without it: task.start=scratch, or task.start.pretrained=FOLDER with published weights"
    return Issue("checkpoint-of-another-model", it.name, problem, it.now, f"Set it to {to_typed(it.before)}, or {anew}")


def _start_issue(it: Difference, step: int, ways: WaysOut, *, is_own: bool) -> Issue:
    problem = f"has no effect: the weights are those of the checkpoint (step {step} of {ways.run})"
    anew = f"begin another run: {ways.anew}" if is_own else "begin without it: task.start=scratch"
    remedy = f"Set it to {to_typed(it.before)}, or {anew}"
    return Issue("first-weights-without-effect", it.name, problem, it.now, remedy)


def _order_issue(it: Difference, step: int, ways: WaysOut, *, is_own: bool) -> Issue:
    of = f"was {to_typed(it.before)} when the checkpoint was saved (step {step} of {ways.run})"
    is_content = it.name in (DATA_CONTENT, TOKENIZER_CONTENT, ROWS)
    back = "Continue with the same data" if is_content else f"Set it to {to_typed(it.before)}"
    other = f"in a new run: {ways.with_other_data}" if is_own else "with task.start.allow_other_data=true"
    anew = ways.anew if is_own else "task.start=scratch"
    remedy = f"{back}, or train on with other data {other}, or begin from step 0: {anew}"
    return Issue("data-order-changed", it.name, f"{of}: samples would be repeated or left out", it.now, remedy)


def _schedule_issue(found: list[Difference], now: Identity, step: int) -> Issue | None:
    changed = {it.name: it for it in found}
    schedule = now.get(FieldClass.SCHEDULE, {}).get(_SCHEDULE)
    if SCHEDULE_STEPS not in changed or (schedule in _UNBOUNDED and WARMUP_STEPS not in changed):
        return None
    before, after = changed[SCHEDULE_STEPS].before, changed[SCHEDULE_STEPS].now
    problem = (
        f"the {schedule} schedule spanned {counted(before, 'step')} and would now span {after}: the rate would jump"
    )
    remedy = f"State {SCHEDULE_STEPS}={before} to keep its course after step {step}, or {SCHEDULE_STEPS}={after}"
    remedy = f"{remedy} for the new one"
    follows = ("checkpoint-already-at-length",)
    return Issue("schedule-length-changed", SCHEDULE_STEPS, problem, remedy=remedy, blocked_by=follows)


def is_partial(meta: Mapping[str, Any]) -> bool:
    """Whether a checkpoint carries no identity: an earlier release saved it."""
    return IDENTITY not in meta
