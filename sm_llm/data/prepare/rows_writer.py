"""Packed rows on disk: Arrow stream files that ``datasets.load_from_disk`` of versions 2.19 and 5 reads."""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sm_llm.data.describe import DATASET_INFO, ROWS_INFO, STATE, RowsInfo, write_json
from sm_llm.errors import DataError
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

COLUMN_TYPES: Mapping[str, str] = {"input_ids": "int32", "labels": "int32", "attention_mask": "int8"}
"""Every column is a fixed-length list. Token ids take 32 bits: vocabularies beyond 65,536 must not wrap."""


class RowsWriter:
    """Writes rows in order to shards of ``rows_per_shard`` rows; a context manager.

    The folder becomes readable only when ``finish`` writes its JSON files, last. Shards are numbered
    ``data-00000-of-0000N.arrow`` as ``datasets`` does, so they get their names at the end too.
    """

    def __init__(
        self, folder: Path, seq_length: int, vocab_size: int, columns: tuple[str, ...], rows_per_shard: int
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = 0
        self.tokens = 0
        # How often each token id occurs, without padding.
        self.counts = np.zeros(vocab_size, np.int64)
        self._crc = 0
        self._first: npt.NDArray[np.int32] | None = None
        self._repeats = True
        self._folder = folder
        self._seq_length = seq_length
        self._names = ("input_ids", *columns)
        self._rows_per_shard = rows_per_shard
        self._shards: list[Path] = []
        self._schema = pa.schema([(name, self._type(name)) for name in self._names])
        self._sink: Any = None
        self._stream: Any = None

    def write(self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_] | None = None) -> None:
        """Append rows, int32 [n, seq_length]; ``mask`` (same shape) is False on padding, None means all real.

        Raises ``DataError`` if an id lies outside the vocabulary.
        """
        if len(ids) == 0:
            return
        # Before anything is written: it refuses ids that lie outside the vocabulary.
        self._count(ids if mask is None else ids[mask])
        if self._first is None:
            # A copy, so that the whole batch is not kept alive.
            self._first = ids[0].copy()
        self._repeats = self._repeats and bool((ids == self._first).all())
        # For the fingerprint of the content (``_state``).
        self._crc = zlib.crc32(np.ascontiguousarray(ids).data, self._crc)
        for begin, end, is_new in self._cuts(len(ids)):
            if is_new:
                self._next_shard()
            part = None if mask is None else mask[begin:end]
            self._stream.write_batch(self._record_batch(ids[begin:end], part))
        self.rows += len(ids)

    def finish(self, split: str, padded: bool) -> RowsInfo:
        """Close the last shard, name the shards and make the folder readable."""
        self._close_shard()
        names = self._name_shards()
        occurring = np.flatnonzero(self.counts)
        info = RowsInfo(
            seq_length=self._seq_length,
            rows=self.rows,
            columns=self._names,
            vocab_size=len(self.counts),
            tokens=self.tokens,
            max_id=int(occurring[-1]) if len(occurring) else None,
            padded=padded,
            repeated=self._repeats and self.rows > 1,
        )
        write_json(self._folder / ROWS_INFO, info.to_json())
        write_json(self._folder / DATASET_INFO, self._dataset_info(split))
        # ``is_dataset`` asks for this file, so it comes last: a killed writer leaves no folder that can be opened.
        write_json(self._folder / STATE, _state(names, split, f"{self._crc:08x}{self.rows % 2**32:08x}"))
        return info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not ``finish``: after an error the folder must stay unreadable.
        self._close_shard()

    def _type(self, name: str) -> pa.DataType:
        return pa.list_(pa.type_for_alias(COLUMN_TYPES[name]), self._seq_length)

    def _count(self, real: npt.NDArray[np.int32]) -> None:
        flat = real.ravel()
        lowest, highest = (int(flat.min()), int(flat.max())) if len(flat) else (0, 0)
        if lowest < 0 or highest >= len(self.counts):
            wrong = lowest if lowest < 0 else highest
            raise DataError(f"token id {wrong} lies outside the vocabulary of {counted(len(self.counts), 'token')}")
        self.counts += np.bincount(flat, minlength=len(self.counts))
        self.tokens += len(flat)

    def _cuts(self, count: int) -> list[tuple[int, int, bool]]:
        """(begin, end, starts a shard) for ``count`` more rows."""
        # The distance to the next shard's start, then one bound for each shard.
        bounds = [0, *range(-self.rows % self._rows_per_shard, count, self._rows_per_shard), count]
        starts = sorted(set(bounds))
        pairs = itertools.pairwise(starts)
        return [(begin, end, (self.rows + begin) % self._rows_per_shard == 0) for begin, end in pairs]

    def _record_batch(self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_] | None) -> pa.RecordBatch:
        return pa.record_batch([self._column(name, ids, mask) for name in self._names], schema=self._schema)

    def _column(self, name: str, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_] | None) -> pa.Array:
        values: npt.NDArray[Any] = ids
        if name == "labels" and mask is not None:
            values = np.where(mask, ids, -100)
        elif name == "attention_mask":
            values = np.ones(ids.shape, np.int8) if mask is None else mask
        flat = np.ascontiguousarray(values, dtype=COLUMN_TYPES[name]).ravel()
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), self._seq_length)

    def _next_shard(self) -> None:
        self._close_shard()
        path = self._folder / f"shard-{len(self._shards):05d}.tmp"
        self._shards.append(path)
        self._sink = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, self._schema)

    def _close_shard(self) -> None:
        # The stream first: closing it writes its end mark into the sink.
        for closable in (self._stream, self._sink):
            if closable is not None:
                closable.close()
        self._stream = self._sink = None

    def _name_shards(self) -> list[str]:
        names = [f"data-{number:05d}-of-{len(self._shards):05d}.arrow" for number in range(len(self._shards))]
        for path, name in zip(self._shards, names, strict=True):
            path.replace(self._folder / name)
        return names

    def _dataset_info(self, split: str) -> dict[str, Any]:
        # "Sequence" is the one spelling of a list feature that datasets 2.19 and 5 both read.
        features = {
            name: {
                "feature": {"dtype": COLUMN_TYPES[name], "_type": "Value"},
                "length": self._seq_length,
                "_type": "Sequence",
            }
            for name in self._names
        }
        size = sum(path.stat().st_size for path in self._folder.glob("data-*.arrow"))
        splits = {split: {"name": split, "num_bytes": size, "num_examples": self.rows, "dataset_name": None}}
        blank = dict.fromkeys(("citation", "description", "homepage", "license"), "")
        return {**blank, "features": features, "splits": splits}


def _state(names: list[str], split: str, fingerprint: str) -> dict[str, Any]:
    # The fingerprint keys the caches of ``datasets``: of the content, so that equal text gives equal files.
    return {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
