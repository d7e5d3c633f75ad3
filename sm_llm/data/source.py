"""What the training loop draws rows from: batches of token ids and labels, by row number or as a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sm_llm.data.order import Ints, mix, stream_key

IGNORED = -100
"""Label of a position that is not trained on."""


@dataclass(frozen=True)
class Batch:
    """``input_ids`` and ``labels``, both int64 [n, seq_length]; labels are not shifted, ``IGNORED`` where masked."""

    input_ids: Ints
    labels: Ints

    @property
    def targets(self) -> int:
        """Labels that count: a model that shifts inside never predicts the first position of a row."""
        return int(np.count_nonzero(self.labels[:, 1:] != IGNORED))


@runtime_checkable
class Source(Protocol):
    """Rows by number. ``count`` rows of ``seq_length`` tokens; ``padded`` if labels may hold ``IGNORED``.

    ``seed`` and ``shuffle`` give the order (``order.row_indices``).
    """

    seq_length: int
    padded: bool
    count: int
    seed: int
    shuffle: bool

    def rows(self, indices: Ints) -> Batch:
        """The rows of these numbers, in this order. Raises ``DataError`` for ids outside the vocabulary."""


class RowStream(Protocol):
    """One rank's endless sequence of rows."""

    def take(self, rows: int) -> Batch:
        """The next rows."""

    def state(self) -> dict[str, Any]:
        """Where the next ``take`` begins, as JSON values."""

    def close(self) -> None:
        """Let go of the stream and its threads."""


@runtime_checkable
class StreamSource(Protocol):
    """Rows that exist only in sequence: no count, no order of ours."""

    seq_length: int
    padded: bool
    count: None

    def open(self, rank: int, degree: int, state: dict[str, Any] | None = None) -> RowStream:
        """The disjoint part of one data-parallel rank, from the start or from a saved ``state``.

        Raises ``DataError`` if the state is of another degree or stream.
        """


class SyntheticSource:
    """Uniform random tokens, a pure function of (seed, split, row, position)."""

    padded = False

    def __init__(self, rows: int, seq_length: int, vocab_size: int, seed: int, shuffle: bool, part: int = 0) -> None:
        self.count = rows
        self.seq_length = seq_length
        self.seed = seed
        self.shuffle = shuffle
        self._vocab_size = vocab_size
        self._key = stream_key(seed, part)

    def rows(self, indices: Ints) -> Batch:
        """Tokens of the rows; ``labels`` are the same array as ``input_ids``."""
        first = indices[:, None] * self.seq_length
        positions = (first + np.arange(self.seq_length)).astype(np.uint64)
        words = mix(self._key + mix(positions))
        # The modulo favours small ids by at most vocab_size / 2**64, which no statistic of a training run can show.
        ids = (words % np.uint64(self._vocab_size)).astype(np.int64)
        return Batch(ids, ids)


class ArraySource:
    """Rows held in memory: the fixed validation rows taken from a stream."""

    def __init__(self, batch: Batch, seed: int = 0, shuffle: bool = False) -> None:
        self.count, self.seq_length = batch.input_ids.shape
        self.padded = bool((batch.labels == IGNORED).any())
        self.seed = seed
        self.shuffle = shuffle
        self._batch = batch

    def rows(self, indices: Ints) -> Batch:
        return Batch(self._batch.input_ids[indices], self._batch.labels[indices])
