"""Packing and end tokens on arrays, against the obvious slow way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.data.json_rows import ragged_to_rows
from sm_llm.data.prepare.pack import Packer, with_end_tokens

documents = st.lists(st.lists(st.integers(1, 99), max_size=9), max_size=12)


def flat(parts: list[list[int]]) -> np.ndarray:
    return np.array([token for part in parts for token in part], np.int32)


@given(documents)
def test_an_end_token_follows_each_document(parts: list[list[int]]) -> None:
    offsets = np.cumsum([0, *map(len, parts)])
    joined = with_end_tokens(flat(parts), offsets, 0)
    assert joined.tolist() == [token for part in parts for token in [*part, 0]]
    assert joined.dtype == np.int32


@given(st.lists(documents, max_size=5), st.integers(2, 7))
def test_rows_do_not_depend_on_how_the_ids_arrive(batches: list[list[list[int]]], seq_length: int) -> None:
    packer = Packer(seq_length)
    rows = [row for batch in batches for row in packer.add(flat(batch)).tolist()]
    everything = [token for batch in batches for part in batch for token in part]
    whole = len(everything) // seq_length * seq_length
    assert rows == [everything[i : i + seq_length] for i in range(0, whole, seq_length)]
    assert packer.tail.tolist() == everything[whole:]


def test_a_padded_tail_knows_what_is_real() -> None:
    packer = Packer(4)
    assert len(packer.add(np.array([5, 6], np.int32))) == 0
    row, mask = packer.padded_tail(0)
    assert row.tolist() == [[5, 6, 0, 0]]
    assert mask.tolist() == [[True, True, False, False]]


@given(documents, st.integers(2, 5))
def test_ragged_sequences_become_rows_without_losing_a_token(parts: list[list[int]], seq_length: int) -> None:
    values = flat(parts).astype(np.int64)
    rows, real = ragged_to_rows(values, np.array([len(p) for p in parts], np.int64), seq_length, fill=-1)
    pieces = [p[i : i + seq_length] for p in parts for i in range(0, len(p), seq_length)]
    assert [row[keep].tolist() for row, keep in zip(rows, real, strict=True)] == pieces
    assert (rows[~real] == -1).all()


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 200_000])
def test_DT17_a_long_document_keeps_its_exact_length(length: int) -> None:
    ids = np.arange(length, dtype=np.int32) % 1000 + 1
    joined = with_end_tokens(ids, np.array([0, length]), 0)
    packer = Packer(100)
    rows = packer.add(joined)
    assert rows.size + len(packer.tail) == length + 1
    assert np.array_equal(np.concatenate([rows.ravel(), packer.tail]), np.append(ids, 0))
