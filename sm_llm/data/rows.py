"""Rows of token ids from disk, memory-mapped: our own folders and those that ``datasets`` saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sm_llm.data.describe import RowsInfo, data_files, describe_rows
from sm_llm.data.source import IGNORED, Batch
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.data.order import Ints

Array = npt.NDArray[Any]
_OUTSIDE = {
    "input_ids": (
        "token id",
        "",
        "Set model.config.vocab_size to the tokenizer's, or prepare the text with the model's own tokenizer",
    ),
    "labels": (
        "label",
        f", or {IGNORED}, which is not trained on",
        f"Set {IGNORED} where nothing is to be learned, and prepare the rows again",
    ),
}
"""Column -> what it holds, what else is allowed there, and what to do about a value outside the vocabulary."""


@dataclass(frozen=True)
class _Chunk:
    """One record batch of one file: a view [n, seq_length] of every column, no copy."""

    file: str
    columns: dict[str, Array]


class RowsFolder:
    """A random-access view of all rows of a folder; opening reads headers only.

    ``len()`` rows of ``seq_length`` tokens in ``columns`` (``input_ids`` and perhaps ``labels``, ``attention_mask``).
    """

    def __init__(self, folder: Path, info: RowsInfo, chunks: list[_Chunk]) -> None:
        self.folder = folder
        self.info = info
        self.columns = tuple(chunks[0].columns)
        self.seq_length = int(chunks[0].columns["input_ids"].shape[1])
        self._chunks = chunks
        self._starts = np.cumsum([0] + [len(chunk.columns["input_ids"]) for chunk in chunks])

    @classmethod
    def open(cls, path: str | Path) -> RowsFolder:
        """Map every file that ``state.json`` lists.

        Raises ``DataError`` if a file is missing or damaged, rows differ in length, or the number of rows is not
        the number written.
        """
        folder = Path(path)
        info = describe_rows(folder)
        chunks = [chunk for path in data_files(folder) for chunk in _open_file(path)]
        if not chunks:
            raise DataError(f"{folder}: holds no rows")
        _check_shapes(folder, chunks)
        opened = cls(folder, info, chunks)
        if info.rows is not None and info.rows != len(opened):
            raise DataError(f"{folder}: {info.rows} rows were written, {len(opened)} are there. Prepare it again")
        return opened

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, indices: Ints) -> dict[str, Array]:
        """Columns of these rows, in this order: arrays [len(indices), seq_length] in the stored integer type."""
        # side="right": an index that equals a start belongs to the chunk that begins there.
        where = np.searchsorted(self._starts, indices, side="right") - 1
        taken = {name: np.empty((len(indices), self.seq_length), view.dtype) for name, view in self._first.items()}
        # One indexed read for each chunk and column instead of one for each row.
        for number in np.unique(where):
            chosen = where == number
            local = indices[chosen] - self._starts[number]
            for name, view in self._chunks[number].columns.items():
                taken[name][chosen] = view[local]
        return taken

    def file_of(self, index: int) -> str:
        """Name of the file that holds a row, for messages."""
        return self._chunks[int(np.searchsorted(self._starts, index, side="right")) - 1].file

    @property
    def _first(self) -> dict[str, Array]:
        return self._chunks[0].columns


class RowsSource:
    """Rows of a folder as training batches; padding (``attention_mask`` 0) is masked in the labels."""

    def __init__(
        self,
        folder: RowsFolder,
        vocab_size: int,
        seed: int,
        shuffle: bool,
        *,
        locate: Callable[[int], str] | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        # What to report about the rows.
        self.notices = tuple(notices)
        self.tokenizer_size = folder.info.vocab_size
        self.vocab_size = vocab_size
        self._locate = locate
        self.count = len(folder)
        self.seq_length = folder.seq_length
        # A foreign folder does not state it: there, every further column may mask labels.
        self.padded = folder.info.padded if folder.info.padded is not None else len(folder.columns) > 1
        self.seed = seed
        self.shuffle = shuffle
        self._folder = folder
        # Our writer stores the largest id, so wrong rows are refused at once; foreign rows are checked batch by batch.
        highest = folder.info.max_id
        if highest is not None and highest >= vocab_size:
            raise DataError(
                f"{folder.folder}: holds token id {highest}, the model's vocabulary has {vocab_size} tokens. "
                "Set model.config.vocab_size to the tokenizer's, or prepare the text with the model's own tokenizer"
            )

    def rows(self, indices: Ints) -> Batch:
        """See ``Source.rows``; ids and labels are checked in every batch, also in rows others wrote."""
        taken = self._folder.take(indices)
        ids = taken["input_ids"].astype(np.int64)
        self._check_range("input_ids", ids, indices)
        labels = taken["labels"].astype(np.int64) if "labels" in taken else ids
        if "attention_mask" in taken:
            self._check_mask(taken["attention_mask"], indices)
            labels = np.where(taken["attention_mask"] == 0, IGNORED, labels)
        # After the mask: what stands below padding is not a label.
        if "labels" in taken:
            self._check_range("labels", labels, indices)
        return Batch(ids, labels)

    def location(self, row: int) -> str:
        """Where a row was written, for messages."""
        if self._locate is not None:
            return self._locate(row)
        return f"{self._folder.folder / self._folder.file_of(row)}: row {row}"

    def _check_mask(self, mask: Array, indices: Ints) -> None:
        """Attention does not see the mask: it is causal, so padding may only follow the text."""
        wrong = ((mask != 0) & (mask != 1)).any(axis=1) | (mask[:, 1:] > mask[:, :-1]).any(axis=1)
        if wrong.any():
            where = self.location(int(indices[np.flatnonzero(wrong)[0]]))
            raise DataError(
                f"{where}: attention_mask must be ones, then zeros: tokens masked before others would be attended to "
                "all the same. Put the padding behind the text, or mask single labels with -100 in a column labels"
            )

    def _check_range(self, column: str, values: Ints, indices: Ints) -> None:
        """Ids select a row of the embedding, labels a logit; a label may be ``IGNORED`` as well."""
        # Read without a sign negative numbers are the largest, those above ``IGNORED`` before it. So nearly every batch
        # is checked in one pass, one with masked labels in three, and none makes an array.
        largest = values.view(np.uint64).max(initial=0)
        masks = column == "labels" and largest == IGNORED % 2**64
        if largest < self.vocab_size or (masks and values.min() >= IGNORED and values.max() < self.vocab_size):
            return
        wrong = (values < 0) | (values >= self.vocab_size)
        if column == "labels":
            wrong &= values != IGNORED
        row, position = np.argwhere(wrong)[0]
        name, ignored, remedy = _OUTSIDE[column]
        raise DataError(
            f"{self.location(int(indices[row]))} holds {name} {values[row, position]} at position {position} of column "
            f"{column}; it must be 0 to {self.vocab_size - 1} (the model's vocabulary has {self.vocab_size} tokens)"
            f"{ignored}. {remedy}"
        )


def _open_file(path: Path) -> list[_Chunk]:
    try:
        # Of a mapped file this makes views: no row is read yet.
        table = pa.ipc.open_stream(pa.memory_map(str(path), "r")).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: not a readable Arrow stream file ({error}). Fetch or prepare it again") from error
    if "input_ids" not in table.column_names:
        raise DataError(f"{path}: has no column input_ids (columns: {', '.join(table.column_names)})")
    names = [name for name in ("input_ids", "labels", "attention_mask") if name in table.column_names]
    # A batch without rows has no row length, and ``_view`` divides by its number of rows.
    batches = [batch for batch in table.to_batches() if batch.num_rows]
    return [_Chunk(path.name, {name: _view(batch.column(name), name, path) for name in names}) for batch in batches]


def _view(column: pa.Array, name: str, path: Path) -> Array:
    """A list column as a 2-D view of its values buffer, or ``DataError`` if that is not what it is."""
    if not (pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type)):
        raise DataError(f"{path}: column {name} holds {column.type}, not lists of integers")
    # Not ``column.values``, which ignores the offset of a sliced column.
    values = column.flatten()
    # Arrow packs booleans into bits, which numpy cannot view.
    if name == "attention_mask" and pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    if not pa.types.is_integer(values.type) or column.null_count or values.null_count:
        raise DataError(f"{path}: column {name} must hold lists of integers without nulls, found {column.type}")
    length, remainder = divmod(len(values), len(column))
    if pa.types.is_list(column.type):
        # A total that divides evenly does not prove that all rows are equally long.
        lengths = np.diff(column.offsets.to_numpy())
        if (lengths != lengths[0]).any():
            raise DataError(f"{path}: rows of {lengths.min()} to {lengths.max()} tokens; all must be equally long")
    if remainder or length == 0:
        raise DataError(f"{path}: column {name} holds rows of no fixed length")
    # zero_copy_only raises where arrow would copy a whole file into memory.
    return np.asarray(values.to_numpy(zero_copy_only=True).reshape(len(column), length))


def _check_shapes(folder: Path, chunks: list[_Chunk]) -> None:
    first = chunks[0]
    for chunk in chunks:
        if tuple(chunk.columns) != tuple(first.columns):
            raise DataError(f"{folder}: {first.file} and {chunk.file} have different columns")
        for name, view in chunk.columns.items():
            expected = first.columns["input_ids"].shape[1]
            if view.shape[1] != expected:
                raise DataError(f"{folder / chunk.file}: {name} rows of {view.shape[1]} tokens, elsewhere {expected}")
