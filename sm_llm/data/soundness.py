"""Whether opened rows can be learned from at all, and what about them is probably not meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sm_llm.data.describe import is_far_smaller
from sm_llm.data.order import row_indices
from sm_llm.data.rows import RowsSource
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from sm_llm.data.order import Ints
    from sm_llm.data.source import Source

_ROWS_AT_ONCE = 256
_SHOWN = 4


def check_targets(source: Source, field: str, max_rows: int | None = None) -> None:
    """Raise ``DataError`` if none of the (first ``max_rows``) rows has a label to learn from.

    Reads no further than the first such row.
    """
    # Only padding or a column of labels can leave a row without any.
    if not source.padded:
        return
    count = source.count if max_rows is None else min(max_rows, source.count)
    for begin in range(0, count, _ROWS_AT_ONCE):
        if source.rows(np.arange(begin, min(begin + _ROWS_AT_ONCE, count))).targets:
            return
    raise DataError(
        f"{field}: none of the {count:,} rows has a label to learn from ({name_rows(source, np.arange(count))}): "
        "attention_mask or labels leave none. Prepare the data again, or give other rows"
    )


def warnings(source: Source) -> list[str]:
    """What is probably not meant in training rows: the same row again and again, a vocabulary hardly used."""
    if not isinstance(source, RowsSource):
        return []
    found = list(source.notices)
    if repeated := _repeated(source):
        found.append(f"task.data.train: {repeated}: the model learns it by heart and nothing else")
    if source.tokenizer_size is not None and is_far_smaller(source.tokenizer_size, source.vocab_size):
        found.append(
            f"task.data.train: the rows were made with {source.tokenizer_size:,} tokens, the model's vocabulary has "
            f"{source.vocab_size:,}: the other rows of its embedding are never trained"
        )
    return found


def _repeated(source: RowsSource) -> str:
    """A sentence about data of one row; "" for others. Two rows are enough for most data, and no more are read then."""
    for chosen in (np.arange(min(source.count, 2)), np.linspace(0, source.count - 1, _ROWS_AT_ONCE).astype(np.int64)):
        numbers = np.unique(chosen)
        ids = source.rows(numbers).input_ids
        if (ids != ids[0]).any():
            return ""
    if source.count == 1:
        return "the data hold a single row"
    compared = f"all {source.count:,}" if len(numbers) == source.count else f"{len(numbers)} of {source.count:,}"
    return f"{compared} rows of the data are the same row"


def rows_of_step(source: Source, step: int, global_batch_size: int) -> Ints:
    """Row numbers of the global batch of ``step`` (1-based)."""
    samples = np.arange((step - 1) * global_batch_size, step * global_batch_size, dtype=np.int64)
    return row_indices(samples, source.count, source.seed, source.shuffle)


def name_rows(source: Source, rows: Ints) -> str:
    """Where rows were written, for messages: the first few of them."""
    if not isinstance(source, RowsSource):
        return ", ".join(f"row {row}" for row in rows[:_SHOWN])
    lines: dict[str, dict[str, None]] = {}
    for row in rows[:_SHOWN]:
        file, _, line = source.location(int(row)).rpartition(":")
        lines.setdefault(file, {})[line] = None
    named = ", ".join(f"{file}:{','.join(found)}" for file, found in lines.items())  # a path once: they are long
    return named if len(rows) <= _SHOWN else f"{named} and {len(rows) - _SHOWN} more"
