"""Packing: a stream of token ids cut into rows of fixed length, the rest carried on to the next call."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


def with_end_tokens(ids: Tokens, offsets: npt.NDArray[np.int64], end_id: int) -> Tokens:
    """Put ``end_id`` behind each document.

    ``ids`` [n] are the documents one after another, ``offsets`` [documents + 1] where each begins and the last
    ends. Returns int32 [n + documents].
    """
    documents = len(offsets) - 1
    # The end of a document moves by one place for each end token in front of it.
    ends = offsets[1:] + np.arange(documents)
    is_text = np.ones(len(ids) + documents, np.bool_)
    is_text[ends] = False
    joined = np.full(len(is_text), end_id, np.int32)
    joined[is_text] = ids
    return joined


class Packer:
    """Cuts ids into rows across calls, documents and files; only the very last, partly filled row is left over."""

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length
        self._tail: Tokens = np.empty(0, np.int32)

    def add(self, ids: Tokens) -> Tokens:
        """Whole rows that are complete now, int32 [rows, seq_length]; possibly none."""
        joined = np.concatenate([self._tail, ids]) if len(self._tail) else ids
        whole = len(joined) // self.seq_length * self.seq_length
        self._tail = joined[whole:].copy()  # a copy, so that the whole batch is not kept alive
        return joined[:whole].reshape(-1, self.seq_length)

    @property
    def tail(self) -> Tokens:
        """Tokens that do not fill a row yet; fewer than ``seq_length``."""
        return self._tail

    def padded_tail(self, pad_id: int) -> tuple[Tokens, Mask]:
        """The last row [1, seq_length], filled up with ``pad_id``, and its mask (False on padding)."""
        row = np.full((1, self.seq_length), pad_id, np.int32)
        row[0, : len(self._tail)] = self._tail
        mask = np.arange(self.seq_length)[None, :] < len(self._tail)
        return row, mask
