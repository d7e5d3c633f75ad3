"""The visiting order: a permutation per epoch, pure, the same for any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from sm_llm.data.order import row_indices


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 63, 64, 65, 1000, 4097])
def test_every_epoch_visits_every_row_once(rows: int) -> None:
    for epoch in range(3):
        visited = row_indices(np.arange(epoch * rows, (epoch + 1) * rows), rows, seed=5, shuffle=True)
        assert sorted(visited) == list(range(rows))


def test_index_by_index_is_the_same_as_all_at_once_in_any_shape() -> None:
    indices = np.arange(40, 400)
    at_once = row_indices(indices, 100, 3, shuffle=True)
    assert [int(row_indices(np.array([i]), 100, 3, True)[0]) for i in indices] == at_once.tolist()
    assert np.array_equal(row_indices(indices.reshape(6, 60), 100, 3, True), at_once.reshape(6, 60))
    assert np.array_equal(row_indices(indices[::-1], 100, 3, True), at_once[::-1])


def test_the_order_is_pinned() -> None:
    """A changed order would silently break the resume of every run made before."""
    assert row_indices(np.arange(8), 8, seed=0, shuffle=True).tolist() == [1, 0, 3, 4, 5, 2, 6, 7]
    assert row_indices(np.arange(8), 8, seed=0, shuffle=False).tolist() == list(range(8))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {
        tuple(row_indices(np.arange(epoch * 50, epoch * 50 + 50), 50, seed, True).tolist())
        for seed in range(20)
        for epoch in range(5)
    }
    assert len(orders) == 100


def test_without_shuffle_rows_come_in_order_epoch_after_epoch() -> None:
    assert row_indices(np.arange(7), 3, 0, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_the_order_looks_random() -> None:
    rows, seeds = 20, 600
    first = np.stack([row_indices(np.arange(rows), rows, seed, True) for seed in range(seeds)])
    for position in (0, 7, 19):  # each row equally likely at each place: chi-square with 19 degrees of freedom
        counts = np.bincount(first[:, position], minlength=rows)
        assert ((counts - seeds / rows) ** 2 / (seeds / rows)).sum() < 50
    neighbours = (np.diff(first, axis=1) == 1).mean()
    assert abs(neighbours - 1 / rows) < 0.01
    long = row_indices(np.arange(100_000), 100_000, 1, True)
    assert abs(np.corrcoef(np.arange(100_000), long)[0, 1]) < 0.02


def test_huge_data_needs_no_memory() -> None:
    rows = 10**12
    visited = row_indices(np.arange(rows - 1000, rows + 1000), rows, 9, shuffle=True)
    assert visited.min() >= 0
    assert visited.max() < rows
    assert len(set(visited[:1000].tolist())) == 1000


def test_no_rows_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        row_indices(np.arange(3), 0, 0, True)
