"""Chooses the settings that a training leaves open (``auto``) by speed and by the memory of a GPU: a pure function.

Each way to save memory has a price in time; a larger micro-batch, and parameters that stay gathered, win time for
memory. The fastest combination whose predicted peak fits is taken. Prices were measured on H200s (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_llm.contract.memory_estimate import GIB, memory_estimate
from sm_llm.models.families.table import family
from sm_llm.spec.derive import derive_task
from sm_llm.spec.machines.hardware import peak_flops
from sm_llm.spec.tasks import (
    AUTO,
    CHECKPOINTING,
    COMPILE,
    MICRO_BATCH,
    RESHARD,
    open_settings,
    plainest,
    setting,
    with_settings,
)
from sm_llm.terminal import counted, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sm_llm.contract.memory_estimate import MemoryEstimate
    from sm_llm.models.families.family import Config
    from sm_llm.spec.machines.hardware import Card
    from sm_llm.spec.tasks import TrainTask

SPEEDS = {"none": 1.0, "budget": 0.992, "selective": 0.923, "every_nth": 0.90, "full": 0.82}
"""Way of checkpointing -> speed relative to none, in the order in which they are tried."""
_MORE_TOKENS = 1180.0
"""A micro-batch of n tokens takes the time of n and this many: products are small, and gathers come once for each."""
_KEPT = 1.025
"""How much faster a step is whose parameters stay gathered."""
_MOST_TOKENS = 65_536
"""Of a micro-batch: more would win less than 1%."""
_USED = 0.97
"""Share of the memory that a prediction may fill, for it errs by a few percent."""
_EAGER_SHARE = 0.4
"""Of the peak rate, that layers reach which are not compiled."""
_COMPILED_SECONDS = 300.0
"""A training shorter than this, by that rate, does not win back the minute that compilation takes."""
_COMPILED_STEPS = 200
"""The same in steps, for a card whose peak rate is not known."""


@dataclass(frozen=True)
class Hardware:
    """Where a training runs."""

    card: Card | None
    """None computes on CPUs."""
    world_size: int
    node_size: int
    no_compiler: str | None = None
    """Why torch.compile cannot work there; None if it can, as far as is known."""


_KINDS_OF_VALUES: dict[str, Callable[[Any], bool]] = {
    MICRO_BATCH: lambda value: type(value) is int and value >= 1,
    CHECKPOINTING: lambda value: isinstance(value, str) and value in SPEEDS,
    RESHARD: lambda value: type(value) is bool,
    COMPILE: lambda value: type(value) is bool,
}
"""Setting -> whether a value is one that is chosen for it."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for the settings that a training left open, and why."""

    values: Mapping[str, Any]
    """Setting, below the task -> value."""
    reason: str
    predicted_bytes: float | None = None
    """Peak of a GPU that was predicted, by the card."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Any, names: Sequence[str]) -> Choice:
        """A choice for the settings ``names``. Raises ``ValueError`` for what ``to_json`` writes for no such choice."""
        if not isinstance(plain, dict) or plain.keys() != {"values", "reason", "predicted_bytes"}:
            raise ValueError("expected an object with values, reason and predicted_bytes")
        values, predicted = plain["values"], plain["predicted_bytes"]
        if not isinstance(values, dict) or values.keys() != set(names):
            raise ValueError(f"values must be those of {', '.join(names)}")
        if wrong := [name for name, value in values.items() if not _KINDS_OF_VALUES[name](value)]:
            raise ValueError(f"{wrong[0]} must not be {values[wrong[0]]!r}")
        if not isinstance(plain["reason"], str) or not isinstance(predicted, float | None):
            raise ValueError("reason must be a text, and predicted_bytes a number or null")
        return cls({name: values[name] for name in names}, plain["reason"], predicted)

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} {_shown(value)}" for name, value in self.values.items())
        return f"{chosen}: {self.reason}"


def choose(config: Config, task: TrainTask, hardware: Hardware, rows: int | None = None) -> Choice | None:
    """Values for everything that ``task`` leaves open; None where it leaves nothing.

    ``config`` is the canonical config of its model, ``rows`` the number of its training rows where they are known.
    Raises ``SpecError`` where the task's numbers do not fit together.
    """
    names = open_settings(task)
    if not names:
        return None
    plain = plainest(task)
    plans = task.parallelism.can.plans_memory
    if not plans or hardware.card is None:
        why = "on CPUs" if plans else f"with strategy {task.parallelism.strategy}"
        return Choice({name: setting(plain, name) for name in names}, f"nothing is planned {why}")
    compiled, why = _compiles(config, task, hardware, rows)
    if COMPILE in names:
        task = with_settings(task, {COMPILE: compiled})
    found = list(_fastest_of_each(config, task, hardware, hardware.card))
    fitting = [it for it in found if it.fits]
    # ``max`` takes the first of equals: the way of checkpointing that comes first.
    best = max(fitting, key=lambda it: it.speed) if fitting else min(found, key=_taken)
    values = {**best.values, COMPILE: compiled}
    return Choice(
        {name: values[name] for name in names},
        "; ".join([_fit(best, hardware.card), *([why] if COMPILE in names else [])]),
        best.estimate.by_card,
    )


@dataclass(frozen=True)
class _Candidate:
    values: dict[str, Any]
    estimate: MemoryEstimate
    speed: float
    fits: bool


def _fastest_of_each(config: Config, task: TrainTask, hardware: Hardware, card: Card) -> Iterator[_Candidate]:
    """For every way of checkpointing and gathering the largest micro-batch that fits; where none does, the one that
    takes least."""
    sizes = _micro_batches(task, hardware)
    for kind in _kinds(task):
        for resharded in _reshards(task, hardware):
            yield _largest(sizes, partial(_candidate, config, task, hardware, card, kind, resharded))


def _largest(sizes: Sequence[int], tried: Callable[[int], _Candidate]) -> _Candidate:
    """The candidate of the largest of ascending ``sizes`` that fits; where none does, the one that takes least."""
    *accumulating, most = sizes
    # The whole batch at once keeps no sums of gradients, and may take less than a part of it.
    whole = tried(most)
    if whole.fits or not accumulating:
        return whole
    # The least that these take: where it does not fit, none of them does.
    found = tried(accumulating[0])
    if not found.fits:
        return min(found, whole, key=_taken)
    # Memory grows with the micro-batch among those that accumulate, so the largest that fits is found by halving.
    low, high = 1, len(accumulating) - 1
    while low <= high:
        middle = (low + high) // 2
        larger = tried(accumulating[middle])
        low, high = (middle + 1, high) if larger.fits else (low, middle - 1)
        found = larger if larger.fits else found
    return found


def _taken(candidate: _Candidate) -> float:
    return candidate.estimate.by_card


def _candidate(
    config: Config, task: TrainTask, hardware: Hardware, card: Card, kind: str, resharded: bool | int, size: int
) -> _Candidate:
    values = {MICRO_BATCH: size, CHECKPOINTING: kind, RESHARD: resharded}
    tried = with_settings(task, values)
    derived = derive_task(tried, hardware.world_size, node_size=hardware.node_size)
    estimate = memory_estimate(config, tried, derived, hardware.node_size, card)
    tokens = size * task.data.seq_length
    speed = SPEEDS[kind] * tokens / (tokens + _MORE_TOKENS) * (_KEPT if resharded is False else 1.0)
    return _Candidate(values, estimate, speed, estimate.by_card <= _USED * card.gib * GIB)


def _kinds(task: TrainTask) -> Sequence[str]:
    given = setting(task, CHECKPOINTING)
    if given != AUTO:
        return [given]
    if task.parallelism.memory().offloads_activations:
        return ["every_nth", "full"]
    if task.precision.compile is True and task.parallelism.degrees.tensor > 1:
        return task.parallelism.can.compile_split
    # The budget is torch.compile's own.
    return [kind for kind in SPEEDS if kind != "budget" or task.precision.compile is True]


def _reshards(task: TrainTask, hardware: Hardware) -> Sequence[bool | int]:
    given = setting(task, RESHARD)
    if given != AUTO:
        return [given]
    # Where nothing is sharded nothing is gathered.
    is_sharded = task.parallelism.layout(hardware.world_size, hardware.node_size).shard > 1
    return [False, True] if is_sharded else [True]


def _micro_batches(task: TrainTask, hardware: Hardware) -> list[int]:
    """Ascending."""
    if task.micro_batch_size != AUTO:
        return [task.micro_batch]
    data = task.parallelism.layout(hardware.world_size, hardware.node_size).data
    own = (task.global_batch_size or data) // data
    most = max(1, _MOST_TOKENS // task.data.seq_length)
    return [size for size in range(1, min(own, most) + 1) if own % size == 0] or [1]


def _compiles(config: Config, task: TrainTask, hardware: Hardware, rows: int | None) -> tuple[bool, str]:
    """Whether layers are compiled, and why."""
    if task.precision.compile != AUTO:
        return task.precision.compile is True, ""
    if task.parallelism.degrees.tensor > 1:
        return False, "not compiled with tensor parallelism, for nobody has measured that yet"
    if hardware.no_compiler is not None:
        return False, f"not compiled: {hardware.no_compiler}"
    derived = derive_task(plainest(task), hardware.world_size, rows, node_size=hardware.node_size)
    peak = peak_flops(hardware.card.name) if hardware.card is not None else None
    if setting(task, CHECKPOINTING) == "budget" or derived.total_steps is None or derived.total_tokens is None:
        return True, "compiled"
    if peak is None:
        pays = derived.total_steps >= _COMPILED_STEPS
        return pays, f"{'compiled' if pays else 'not compiled'} for {counted(derived.total_steps, 'step')}"
    flops = family(config).flops_per_token(config, task.data.seq_length) * derived.total_tokens
    seconds = flops / (peak * _EAGER_SHARE * hardware.world_size)
    pays = seconds >= _COMPILED_SECONDS
    return pays, f"{'compiled' if pays else 'not compiled'} for about {duration(seconds)} of training"


def _fit(best: _Candidate, card: Card) -> str:
    size = f"{best.estimate.by_card / GIB:.1f} GiB of {card}"
    if not best.fits and best.estimate.by_card <= card.gib * GIB:
        return f"nothing leaves {1 - _USED:.0%} of the memory free, and this takes least, {size}"
    if not best.fits:
        return f"nothing is predicted to fit, and this takes least, {size}"
    return f"the fastest that is predicted to fit, {size}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
