"""All arithmetic of a job: degrees, batch, steps, warm-up and intervals, for the plan and the worker alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.parallelism.base import divisors, listed
from sm_llm.spec.training import SyntheticData
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from sm_llm.spec.tasks import TrainTask

# A run without stated intervals saves, and validates, about this often.
_INTERVALS_PER_RUN = 10


@dataclass(frozen=True)
class Derived:
    """Numbers that follow from a job. ``None`` where they hang on a row count that is not known yet."""

    world_size: int
    data_parallel_degree: int
    micro_batch_size: int
    accumulation_steps: int
    """Micro-batches per rank in one optimiser step."""
    global_batch_size: int
    """Sequences in one optimiser step."""
    seq_length: int
    tokens_per_step: int
    total_steps: int | None
    total_tokens: int | None
    epochs: float | None
    """Passes over the rows."""
    schedule_steps: int | None
    """Steps that the learning rate's schedule spans."""
    warmup_steps: int | None
    checkpoint_every: int | None
    validation_every: int | None


def derive_task(task: TrainTask, world_size: int, rows: int | None = None, *, node_size: int | None = None) -> Derived:
    """``derive`` for a training task on ``world_size`` processes, ``node_size`` (None: all) of them on each node.

    ``rows`` is the number of training rows where it is known. Raises ``SpecError`` as ``derive`` and
    ``StrategySpec.layout`` do.
    """
    if rows is None and isinstance(task.data, SyntheticData):
        rows = task.data.rows
    return _derived(
        world_size=world_size,
        data_parallel_degree=task.parallelism.layout(world_size, node_size).data,
        micro_batch_size=task.micro_batch,
        global_batch_size=task.global_batch_size,
        seq_length=task.data.seq_length,
        max_steps=task.max_steps,
        max_tokens=task.max_tokens,
        max_epochs=task.max_epochs,
        rows=rows,
        schedule_steps=task.optim.schedule_steps,
        warmup_steps=task.optim.warmup_steps,
        warmup_fraction=task.optim.warmup_fraction,
        checkpoint_every=task.checkpoint.every_steps,
        validation_every=task.validation.every_steps,
    )


def derive(
    *,
    world_size: int,
    micro_batch_size: int,
    seq_length: int,
    data_parallel_degree: int | None = None,
    global_batch_size: int | None = None,
    max_steps: int | None = None,
    max_tokens: int | None = None,
    max_epochs: float | None = None,
    rows: int | None = None,
    schedule_steps: int | None = None,
    warmup_steps: int | None = None,
    warmup_fraction: float | None = None,
    checkpoint_every: int | None = None,
    validation_every: int | None = None,
) -> Derived:
    """Derive every number of a training job from the few that are typed.

    With ``data_parallel_degree`` d (None: the world size), micro-batch m, sequence s and global batch g:
    ``accumulation_steps = g / (m d)``, ``tokens_per_step = g s``; steps are ``max_steps``, or
    ``ceil(max_tokens / tokens_per_step)``, or ``max(1, floor(max_epochs rows / g))``.

    Raises:
        SpecError: every issue found, each with the arithmetic and values that would work.
    """
    degree = data_parallel_degree or world_size
    batch = degree * micro_batch_size if global_batch_size is None else global_batch_size
    issues = _batch_issues(batch, micro_batch_size, degree)
    steps = _total_steps(batch, batch * seq_length, max_steps, max_tokens, max_epochs, rows)
    span = steps if schedule_steps is None else schedule_steps
    issues += _warmup_issues(warmup_steps, span)
    if issues:
        raise SpecError(issues)
    return Derived(
        world_size=world_size,
        data_parallel_degree=degree,
        micro_batch_size=micro_batch_size,
        accumulation_steps=batch // (micro_batch_size * degree),
        global_batch_size=batch,
        seq_length=seq_length,
        tokens_per_step=batch * seq_length,
        total_steps=steps,
        total_tokens=None if steps is None else steps * batch * seq_length,
        epochs=None if steps is None or not rows else steps * batch / rows,
        schedule_steps=span,
        warmup_steps=_warmup(warmup_steps, warmup_fraction, span),
        checkpoint_every=_interval(checkpoint_every, steps),
        validation_every=_interval(validation_every, steps),
    )


# The checks of a specification and its plan ask for the same numbers one after the other.
_derived = lru_cache(maxsize=64)(derive)


def _total_steps(
    batch: int,
    tokens_per_step: int,
    max_steps: int | None,
    max_tokens: int | None,
    max_epochs: float | None,
    rows: int | None,
) -> int | None:
    if max_steps is not None:
        return max_steps
    if max_tokens is not None:
        # Exact: as a float, a quotient of large numbers could be rounded past a whole step.
        return math.ceil(Fraction(max_tokens, tokens_per_step))
    if max_epochs is None or rows is None:
        return None
    # The decimal that was typed, not its nearest binary fraction: 0.3 epochs of 1000 rows are 300 rows.
    return max(1, math.floor(Fraction(str(max_epochs)) * rows / batch))


def _warmup(warmup_steps: int | None, warmup_fraction: float | None, steps: int | None) -> int | None:
    if warmup_steps is not None:
        return warmup_steps
    if not warmup_fraction:
        return 0
    # A fraction above 0 asks for a warm-up, so there is at least one step of it.
    return None if steps is None else max(1, round(warmup_fraction * steps))


def _interval(every: int | None, steps: int | None) -> int | None:
    if every is not None or steps is None:
        return every
    return math.ceil(steps / _INTERVALS_PER_RUN)


def _batch_issues(batch: int, micro_batch_size: int, degree: int) -> list[Issue]:
    unit = micro_batch_size * degree
    if batch % unit == 0:
        return []
    # The nearest batches that work, below and above; 0 is not one of them.
    lower = batch // unit * unit
    batches = [str(value) for value in (lower, lower + unit) if value]
    remedy = f"A global batch of {' or '.join(batches)} works"
    # Another micro-batch helps only where the ranks divide the batch.
    if batch % degree == 0:
        remedy += f"; so does a micro-batch of {listed(divisors(batch // degree))}"
    problem = (
        f"not divisible by micro_batch_size x data_parallel_degree = {micro_batch_size} x {degree} = {unit}: "
        f"{batch} / {unit} leaves {batch % unit}"
    )
    return [Issue("batch-not-divisible", "task.global_batch_size", problem, batch, remedy)]


def _warmup_issues(warmup_steps: int | None, steps: int | None) -> list[Issue]:
    if warmup_steps is None or steps is None or warmup_steps <= steps:
        return []
    problem = f"warm-up is longer than the schedule, {counted(steps, 'step')}"
    return [
        Issue(
            "warmup-longer-than-schedule",
            "task.optim.warmup_steps",
            problem,
            warmup_steps,
            f"Use at most {steps}, or warmup_fraction",
        )
    ]
