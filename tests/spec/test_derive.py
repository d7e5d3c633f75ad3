"""The arithmetic of a job."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sm_llm.errors import SpecError
from sm_llm.spec.derive import derive, derive_task
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.training import RowsData, SyntheticData


def test_batch_steps_tokens_and_epochs_follow() -> None:
    derived = derive(
        world_size=4, micro_batch_size=2, global_batch_size=32, seq_length=100, max_steps=50, rows=800, warmup_steps=5
    )
    assert derived.data_parallel_degree == 4
    assert derived.accumulation_steps == 4
    assert derived.tokens_per_step == 3200
    assert derived.total_steps == 50
    assert derived.total_tokens == 160_000
    assert derived.epochs == 2.0
    assert derived.warmup_steps == 5
    assert derived.checkpoint_every == 5
    assert derived.validation_every == 5


def test_without_a_global_batch_every_rank_does_one_micro_batch() -> None:
    derived = derive(world_size=3, micro_batch_size=5, seq_length=8, max_steps=1)
    assert (derived.global_batch_size, derived.accumulation_steps) == (15, 1)


def test_tokens_are_rounded_up_to_whole_steps() -> None:
    assert derive(world_size=1, micro_batch_size=2, seq_length=10, max_tokens=100).total_steps == 5
    assert derive(world_size=1, micro_batch_size=2, seq_length=10, max_tokens=101).total_steps == 6
    assert derive(world_size=1, micro_batch_size=1, seq_length=2, max_tokens=10**18 + 1).total_steps == 5 * 10**17 + 1


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1, 1000, 100), (0.3, 1000, 30), (2.5, 1000, 250), (0.001, 1000, 1), (1, 1009, 100)]
)
def test_epochs_are_rounded_down_and_are_the_decimal_that_was_typed(epochs: float, rows: int, steps: int) -> None:
    assert derive(world_size=2, micro_batch_size=5, seq_length=8, max_epochs=epochs, rows=rows).total_steps == steps


def test_without_a_row_count_what_hangs_on_it_is_open() -> None:
    derived = derive(world_size=1, micro_batch_size=1, seq_length=8, max_epochs=2, warmup_fraction=0.1)
    unknown = (derived.total_steps, derived.total_tokens, derived.epochs, derived.warmup_steps)
    assert unknown == (None, None, None, None)
    assert (derived.checkpoint_every, derived.validation_every) == (None, None)
    assert derived.tokens_per_step == 8


@pytest.mark.parametrize(("fraction", "steps"), [(0.1, 10), (0.001, 1), (0.0, 0), (None, 0)])
def test_a_warm_up_fraction_is_at_least_one_step(fraction: float | None, steps: int) -> None:
    derived = derive(world_size=1, micro_batch_size=1, seq_length=8, max_steps=100, warmup_fraction=fraction)
    assert derived.warmup_steps == steps


def test_given_intervals_are_kept_and_derived_ones_are_about_a_tenth() -> None:
    derived = derive(world_size=1, micro_batch_size=1, seq_length=8, max_steps=95, checkpoint_every=50)
    assert derived.checkpoint_every == 50
    assert derived.validation_every == 10


def test_an_uneven_batch_shows_the_arithmetic_and_what_works() -> None:
    with pytest.raises(SpecError) as caught:
        derive(world_size=2, micro_batch_size=4, global_batch_size=12, seq_length=8, max_steps=10, warmup_steps=11)
    text = str(caught.value)
    assert "task.global_batch_size" in text
    assert "4 x 2 = 8: 12 / 8 leaves 4" in text
    assert "A global batch of 8 or 16 works; so does a micro-batch of 1, 2, 3, 6" in text
    assert "task.optim.warmup_steps" in text
    assert "Use at most 10" in text


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 600))
def test_the_values_offered_do_work(world: int, micro: int, batch: int) -> None:
    assume(batch % (world * micro))
    with pytest.raises(SpecError) as caught:
        derive(world_size=world, micro_batch_size=micro, global_batch_size=batch, seq_length=2, max_steps=1)
    offered = caught.value.issues[0].remedy.removeprefix("A global batch of ").partition(" works")[0].split(" or ")
    for value in offered:
        derive(world_size=world, micro_batch_size=micro, global_batch_size=int(value), seq_length=2, max_steps=1)


def test_a_task_brings_its_own_numbers() -> None:
    task = TrainTask(data=SyntheticData(seq_length=16, rows=64), micro_batch_size=4, max_epochs=2.0)
    derived = derive_task(task, world_size=2)
    assert (derived.total_steps, derived.epochs) == (16, 2.0)
    rows = TrainTask(data=RowsData(train="x", seq_length=16), max_epochs=1.0)
    assert derive_task(rows, 2).total_steps is None
    assert derive_task(rows, 2, rows=10).total_steps == 5
