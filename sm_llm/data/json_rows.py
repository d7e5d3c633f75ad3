"""Token rows from line files (the AWS examples' ``.json`` and ``.json.gz``), converted once per node to mapped rows."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import re
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json

from sm_llm.data.describe import is_dataset
from sm_llm.data.rows_writer import RowsWriter
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

Ids = npt.NDArray[np.int64]

SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
BLOCK_BYTES = 16_000_000
ROWS_PER_SHARD = 100_000
_OBJECT = re.compile(rb"\s*\{")
_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("attention_mask", pa.list_(pa.int64()))])


def convert(folder: Path, seq_length: int, vocab_size: int, scratch: Path | None) -> Path:
    """A folder of rows (``rows.RowsFolder``) with the content of all line files of ``folder``, in order of name.

    Every line is an object with ``input_ids`` and, if some of it is padding, ``attention_mask`` of equal length.
    Shorter lines are padded to ``seq_length`` with mask 0; longer ones are cut into several rows, so no token is
    lost. The result is kept under ``scratch`` (default: the temporary folder), made by the first process of a
    node that asks and shared by the others. Raises ``DataError`` naming file and line.
    """
    files = line_files(folder)
    scratch = scratch or Path(tempfile.gettempdir()) / "sm-llm"
    scratch.mkdir(parents=True, exist_ok=True)
    target = scratch / f"json-rows-{_digest(folder, files, seq_length, vocab_size)}"
    with _locked(target.with_suffix(".lock")):
        if not is_dataset(target):
            _write(files, target, seq_length, vocab_size)
    return target


def ragged_to_rows(values: Ids, lengths: Ids, seq_length: int, fill: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Sequences of these ``lengths``, one after another in ``values``, as rows of ``seq_length``.

    A longer sequence takes several rows, an empty one none. Returns the rows and which of their places are real.
    """
    pieces = -(-lengths // seq_length)
    begins = np.cumsum(lengths) - lengths
    of_sequence = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(of_sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * seq_length
    left = lengths[of_sequence] - start
    places = np.arange(seq_length)
    real = places[None, :] < left[:, None]
    index = np.where(real, (begins[of_sequence] + start)[:, None] + places, 0)
    rows = np.where(real, values[index], fill) if len(values) else np.empty((0, seq_length), np.int64)
    return rows, real


def line_files(folder: Path) -> list[Path]:
    """The line files of a folder, in the order in which they are read. Raises ``DataError``."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of line files")
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name.endswith(SUFFIXES)]
    if not found:
        others = sorted({path.suffix or path.name for path in folder.rglob("*") if path.is_file()})
        raise DataError(f"{folder}: no file ends in {', '.join(SUFFIXES)} (found: {', '.join(others) or 'nothing'})")
    return found


def _digest(folder: Path, files: list[Path], seq_length: int, vocab_size: int) -> str:
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([str(folder.resolve()), facts, seq_length, vocab_size])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process of this machine at a time; the lock dies with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(files: list[Path], target: Path, seq_length: int, vocab_size: int) -> None:
    temporary = target.with_suffix(".tmp")
    if temporary.is_dir():
        shutil.rmtree(temporary)
    with RowsWriter(temporary, seq_length, vocab_size, ("attention_mask",), ROWS_PER_SHARD) as writer:
        padded = False
        for path in files:
            for ids, mask in _file_rows(path, seq_length, vocab_size):
                padded = padded or not bool(mask.all())
                writer.write(ids.astype(np.int32), mask)
        if writer.rows == 0:
            raise DataError(f"{files[0].parent}: {len(files)} files hold no rows")
        writer.finish("train", padded)
    temporary.replace(target)


def _file_rows(path: Path, seq_length: int, vocab_size: int) -> Iterator[tuple[Ids, npt.NDArray[np.bool_]]]:
    for first_line, block in _blocks(path):
        parsed = _parse(block)
        if parsed is None or not _is_sound(*parsed[:2], vocab_size):
            raise DataError(_explain(path, first_line, block, vocab_size))
        ids, mask, lengths = parsed
        rows, real = ragged_to_rows(ids, lengths, seq_length, fill=0)
        kept, _ = ragged_to_rows(mask, lengths, seq_length, fill=0)
        yield rows, real & (kept != 0)


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(1-based number of the first line, whole lines of about ``BLOCK_BYTES``)."""
    try:
        with cast("BinaryIO", gzip.open(path) if path.name.endswith(".gz") else path.open("rb")) as stream:
            line = 1
            while block := stream.read(BLOCK_BYTES):
                block += stream.readline()
                if not block.isspace():
                    yield line, block
                line += block.count(b"\n")
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}). Fetch it again") from error


def _parse(block: bytes) -> tuple[Ids, Ids, Ids] | None:
    """(ids, mask, lengths), or None if some line does not fit; arrow's parser needs no Python object per token."""
    if not _OBJECT.match(block):  # arrow 26 dies of a block that begins with null
        return None
    try:
        table = pa.json.read_json(
            pa.BufferReader(block),
            pa.json.ReadOptions(block_size=len(block) + 1),
            pa.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowException:
        return None
    (ids, lengths), (given, given_lengths) = (_ragged(table.column(name).combine_chunks()) for name in _SCHEMA.names)
    has_mask = given_lengths >= 0
    if (lengths < 0).any() or (lengths != given_lengths)[has_mask].any():
        return None
    mask = np.ones_like(ids)
    mask[np.repeat(has_mask, lengths)] = given
    return ids, mask, lengths


def _ragged(column: Any) -> tuple[Ids, Ids]:
    """(values, lengths) of a list column; a missing list has length -1, a missing value is -1."""
    values = column.flatten()
    lengths = np.asarray(column.value_lengths().fill_null(-1), np.int64)
    return np.asarray(values.fill_null(-1), np.int64), lengths


def _is_sound(ids: Ids, mask: Ids, vocab_size: int) -> bool:
    return bool((ids >= 0).all() and (ids < vocab_size).all() and (mask >= 0).all())


def _explain(path: Path, first_line: int, block: bytes, vocab_size: int) -> str:
    """Which line is wrong, and why: the slow way, taken only to say so."""
    for number, line in enumerate(block.split(b"\n"), first_line):
        if line.strip() and (problem := _problem(line, vocab_size)):
            return f"{path}:{number}: {problem}"
    return f"{path}:{first_line}: a line from here on is not a row of token ids"


def _problem(line: bytes, vocab_size: int) -> str | None:
    try:
        row = json.loads(line)
    except ValueError as error:
        return f"not JSON ({error})"
    if not isinstance(row, dict):
        return f"a JSON object is expected, found {type(row).__name__}"
    ids = row.get("input_ids")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        return f"input_ids must be a list of whole numbers; fields found: {', '.join(row) or 'none'}"
    mask = row.get("attention_mask")
    if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids) or None in mask):
        return f"attention_mask must be a list of 0 and 1 as long as input_ids ({len(ids)})"
    wrong = next((item for item in ids if not 0 <= item < vocab_size), None)
    return None if wrong is None else f"token id {wrong} lies outside the vocabulary of {vocab_size} tokens"
