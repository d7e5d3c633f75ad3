"""Batches: the same samples in the same order for any number of ranks, from any step, in equal shares."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.loader import Batches, evaluation_batches, open_source
from sm_llm.data.order import row_indices
from sm_llm.data.prefetch import Prefetcher
from sm_llm.data.source import ArraySource, Batch, SyntheticSource
from sm_llm.errors import DataError
from sm_llm.spec.training import RowsData, SyntheticData

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def numbered(rows: int, shuffle: bool = True, seed: int = 1) -> ArraySource:
    """A source whose every token is its row number."""
    ids = np.repeat(np.arange(rows, dtype=np.int64)[:, None], 3, axis=1)
    return ArraySource(Batch(ids, ids), seed, shuffle)


def samples(
    source: ArraySource, steps: int, *, micro: int, accumulation: int, degree: int, start: int = 0
) -> list[Any]:
    """Sorted row numbers of every step over all ranks."""
    per_rank = []
    for rank in range(degree):
        numbers = {"micro_batch_size": micro, "accumulation_steps": accumulation, "rank": rank, "degree": degree}
        with Batches(source, **numbers, start_step=start, total_steps=start + steps) as batches:
            per_rank.append([np.concatenate([b.input_ids[:, 0] for b in step]) for step in batches])
    assert {len(steps) for steps in per_rank} == {steps}
    return [sorted(np.concatenate(parts).tolist()) for parts in zip(*per_rank, strict=True)]


def test_every_world_size_sees_the_same_samples_in_every_step() -> None:
    source = numbered(37)
    expected = [
        sorted(row_indices(np.arange(s * 8, s * 8 + 8), 37, 1, True).tolist()) for s in range(12)
    ]  # crosses epochs
    for micro, accumulation, degree in ((8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2), (1, 1, 8)):
        assert samples(source, 12, micro=micro, accumulation=accumulation, degree=degree) == expected


def test_CK26_continuing_at_a_step_repeats_and_leaves_out_nothing() -> None:
    source = numbered(37)
    whole = samples(source, 15, micro=2, accumulation=2, degree=2)
    parts = [samples(source, n, micro=2, accumulation=2, degree=2, start=s) for s, n in ((0, 4), (4, 1), (5, 10))]
    assert [step for part in parts for step in part] == whole
    one_epoch = [number for step in whole for number in step][:37]
    assert len(one_epoch) == 37


def test_an_epoch_holds_every_row_once() -> None:
    steps = samples(numbered(24), 6, micro=2, accumulation=1, degree=4)
    assert sorted(n for step in steps[:3] for n in step) == list(range(24))
    assert sorted(n for step in steps[3:] for n in step) == list(range(24))


def test_a_step_is_a_list_of_micro_batches() -> None:
    with Batches(numbered(9), micro_batch_size=2, accumulation_steps=3, rank=0, degree=1) as batches:
        step = next(batches)
        assert [batch.input_ids.shape for batch in step] == [(2, 3)] * 3
        assert batches.state() == {}
        assert batches.global_batch_size == 6


def test_ranks_never_end_apart_whatever_the_rows() -> None:
    """DT15: 3 rows over 8 ranks."""
    assert [len(step) for step in samples(numbered(3), 5, micro=1, accumulation=1, degree=8)] == [8] * 5


@pytest.mark.parametrize(("rows", "max_rows"), [(10, None), (10, 7), (3, None), (8, None), (10, 100)])
def test_evaluation_has_each_row_on_one_rank_and_equal_passes(rows: int, max_rows: int | None) -> None:
    source = numbered(rows)
    per_rank = [list(evaluation_batches(source, 2, rank, 4, max_rows)) for rank in range(4)]
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(batch.input_ids.shape == (2, 3) for batches in per_rank for batch in batches)
    labels = np.concatenate([batch.labels for batches in per_rank for batch in batches])
    counted = sorted(labels[:, 0][labels[:, 0] != -100].tolist())
    assert counted == list(range(min(rows, max_rows or rows)))
    assert sum(b.targets for batches in per_rank for b in batches) == 2 * len(counted)


def test_synthetic_rows_are_pure_and_uniform() -> None:
    data = SyntheticData(rows=50, validation_rows=5, seq_length=128)
    source = open_source(data, "train", 100, 7)
    assert isinstance(source, SyntheticSource)
    first = source.rows(np.arange(50))
    assert np.array_equal(first.input_ids[[3, 40]], source.rows(np.array([3, 40])).input_ids)
    assert len(np.unique(first.input_ids, axis=0)) == 50
    counts = np.bincount(first.input_ids.ravel(), minlength=100)
    assert ((counts - 64) ** 2 / 64).sum() < 160  # chi-square, 99 degrees of freedom
    other = open_source(data, "train", 100, 8)
    validation = open_source(data, "validation", 100, 7)
    assert validation is not None
    assert (validation.count, validation.shuffle) == (5, False)
    for rows in (other.rows(np.arange(5)), validation.rows(np.arange(5))):  # type: ignore[union-attr]
        assert not np.array_equal(rows.input_ids, first.input_ids[:5])
    assert open_source(SyntheticData(seq_length=4), "validation", 100, 7) is None


def test_prepared_rows_open_by_specification(
    tmp_path: Path, run_prepare: Callable[..., Any], texts: list[str], write_jsonl: Callable[..., Path]
) -> None:
    run_prepare(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]), validation_fraction=0.1)
    folders = {"train": str(tmp_path / "out" / "train"), "validation": str(tmp_path / "out" / "validation")}
    data = RowsData(**folders, seq_length=16)
    train, validation = open_source(data, "train", 400, 2), open_source(data, "validation", 400, 2)
    assert validation is not None
    assert (train.shuffle, train.seed, train.padded, validation.shuffle) == (True, 2, False, False)  # type: ignore[union-attr]
    assert open_source(RowsData(train=folders["train"], seq_length=16), "validation", 400, 2) is None
    with pytest.raises(DataError, match=r"hold 16 tokens, the job asks for 32\. Set data\.seq_length=16"):
        open_source(RowsData(**folders, seq_length=32), "train", 400, 2)
    with pytest.raises(DataError, match="vocabulary has 300 tokens"):
        open_source(data, "train", 300, 2)


def test_the_thread_runs_a_bounded_number_of_steps_ahead_and_measures_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    waits, now = threading.Event(), [7.0]

    def clock() -> float:
        waits.set()
        return now[0]

    def slow() -> Iterator[int]:
        for number in range(100):
            if number == 0:
                waits.wait()
                now[0] += 0.5
            made.append(number)
            yield number

    monkeypatch.setattr("sm_llm.data.prefetch.time", SimpleNamespace(perf_counter=clock))
    prefetcher = Prefetcher(slow(), depth=2)
    assert next(prefetcher) == 0
    assert prefetcher.wait_seconds == 0.5
    deadline = time.monotonic() + 60
    while len(made) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(made) <= 5
    assert next(prefetcher) == 1
    assert prefetcher.wait_seconds == 0.5, "it was there"
    prefetcher.close()
    assert next(prefetcher, None) is None


def test_an_error_in_the_thread_is_raised_where_the_batch_was_wanted() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise DataError("row 7 is broken")

    prefetcher = Prefetcher(broken())
    assert next(prefetcher) == 1
    for _ in range(2):
        with pytest.raises(DataError, match="row 7"):
            next(prefetcher)


def test_closing_ends_the_thread_and_closes_the_source() -> None:
    before = set(threading.enumerate())
    closed = []

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(True)

    prefetcher = Prefetcher(endless(), name="endless")
    next(prefetcher)
    prefetcher.close()
    assert closed == [True]
    with Batches(numbered(5), micro_batch_size=1, accumulation_steps=1, rank=0, degree=1) as batches:
        next(batches)
    # Threads of other tests may begin and end meanwhile.
    left = {it.name for it in set(threading.enumerate()) - before}
    assert not left & {"endless", "sm-llm-batches"}
