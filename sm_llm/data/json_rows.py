"""Token rows from line files (the AWS examples' ``.json`` and ``.json.gz``), converted once per node to mapped rows."""

from __future__ import annotations

import codecs
import fcntl
import gzip
import hashlib
import json
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json

from sm_llm.data.compressed import whole_gzip
from sm_llm.data.describe import is_dataset, read_json, write_json
from sm_llm.data.peek import LINE_SUFFIXES, line_files
from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.data.prepare.source_files import is_hidden
from sm_llm.errors import DataError
from sm_llm.owned import temporary_folder
from sm_llm.runs.run_folders import files_outside_runs, runs_sentence
from sm_llm.terminal import counted, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Ids = npt.NDArray[np.int64]

BLOCK_BYTES = 16_000_000
ROWS_PER_SHARD = 100_000
# Beside a conversion's rows: which files they come from, and how many of them have nothing to learn from.
_FILES = "files.json"
# Lists and objects of a line whose further fields are named: arrow descends into each by a call of its own.
_MOST_NESTED = 100
_OBJECT = re.compile(rb"\s*\{")
_SCHEMA = pa.schema([(name, pa.list_(pa.int64())) for name in ("input_ids", "attention_mask", "labels")])


def convert(folder: Path, seq_length: int, vocab_size: int, scratch: Path | None) -> Path:
    """A folder of rows (``rows.RowsFolder``) with the content of all line files of ``folder``, in order of name.

    Every line is an object with ``input_ids`` and, if some of it is padding, ``attention_mask`` of equal length.
    Shorter lines are padded to ``seq_length`` with mask 0; longer ones are cut into several rows, so no token is
    lost. A mask must be ones, then zeros: attention itself does not see it. The result is kept under ``scratch``
    (default: this user's temporary folder), made by the first process of a node that asks and shared by the others.
    Raises ``DataError`` naming file and line.
    """
    files = line_files(folder)
    try:
        scratch = scratch or temporary_folder()
    except PermissionError as error:
        raise DataError(f"{folder}: cannot be converted: {error}. Set TMPDIR to a folder of your own") from None
    scratch.mkdir(parents=True, exist_ok=True)
    # The name holds everything that the rows depend on: changed files get another folder, never an outdated one.
    target = scratch / f"json-rows-{_digest(folder, files, seq_length, vocab_size)}"
    # All processes of a node arrive here at once: one converts, the others wait for the lock and find its folder.
    with _locked(target.with_suffix(".lock")):
        if not is_dataset(target):
            _write(folder, files, target, seq_length, vocab_size)
    return target


def ragged_to_rows(values: Ids, lengths: Ids, seq_length: int, fill: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Sequences of these ``lengths``, one after another in ``values``, as rows of ``seq_length``.

    A longer sequence takes several rows, an empty one none. Returns the rows and which of their places are real.
    """
    # For every row: the sequence that it belongs to, and its number among the rows of that sequence.
    pieces = -(-lengths // seq_length)
    begins = np.cumsum(lengths) - lengths
    of_sequence = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(of_sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * seq_length
    left = lengths[of_sequence] - start
    positions = np.arange(seq_length)
    real = positions[None, :] < left[:, None]
    # Places that are not real read index 0; ``fill`` replaces what they find there.
    index = np.where(real, (begins[of_sequence] + start)[:, None] + positions, 0)
    rows = np.where(real, values[index], fill) if len(values) else np.empty((0, seq_length), np.int64)
    return rows, real


def left_out(folder: Path) -> list[str]:
    """What to report of files in the folder that are not read."""
    paths, runs = files_outside_runs(folder)
    hidden = sum(is_hidden(path, folder) for path in paths)
    others = sum(not is_hidden(path, folder) and not path.name.endswith(LINE_SUFFIXES) for path in paths)
    found = [(hidden, "hidden file", " (names that begin with . or _)"), (others, "file", " of other kinds")]
    reports = [f"{folder}: {counted(number, name)}{which} left out" for number, name, which in found if number]
    return [*reports, runs_sentence(folder, folder, runs)] if runs else reports


class RowLocations:
    """Where the rows of a conversion were written: ``location(row)`` is ``file:line``."""

    def __init__(self, folder: Path, converted: Path, seq_length: int) -> None:
        self._folder = folder
        self._seq_length = seq_length
        self._facts = read_json(converted / _FILES)

    @property
    def notices(self) -> list[str]:
        """What to report of the rows."""
        empty, others = self._facts["without_targets"], self._facts["not_read"]
        found = [f"{self._folder}: {counted(empty, 'row')} without a label to learn from"] if empty else []
        return [*found, f"{self._folder}: fields that are not read: {quoted(*others)}"] if others else found

    def location(self, row: int) -> str:
        """Reads the file again up to the row: for messages only."""
        name, first = next((name, first) for name, first in reversed(self._facts["files"]) if first <= row)
        rest = row - first
        for first_line, block in _blocks(self._folder / name):
            for number, line in enumerate(block.split(b"\n"), first_line):
                if line.strip():
                    ids, mask = _values(json.loads(line))
                    # As many rows as ``_file_rows`` made of this line.
                    rest -= max(-(-sum(mask) // self._seq_length), min(1, len(ids)))
                    if rest < 0:
                        return f"{self._folder / name}:{number}"
        return f"{self._folder / name}: row {row}"


def _digest(folder: Path, files: list[Path], seq_length: int, vocab_size: int) -> str:
    facts = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([_FILES, _SCHEMA.names, str(folder.resolve()), facts, seq_length, vocab_size])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process of this machine at a time; the lock dies with its holder."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(folder: Path, files: list[Path], target: Path, seq_length: int, vocab_size: int) -> None:
    # A process that was killed while it converted left this; we hold the lock, so nobody writes it now.
    temporary = target.with_suffix(".tmp")
    if temporary.is_dir():
        shutil.rmtree(temporary)
    with RowsWriter(temporary, seq_length, vocab_size, ("attention_mask",), ROWS_PER_SHARD) as writer:
        padded, empty, firsts, others = False, 0, [], set[str]()
        for path in files:
            firsts.append([path.relative_to(folder).as_posix(), writer.rows])
            for ids, mask in _file_rows(path, seq_length, vocab_size, others):
                padded = padded or not bool(mask.all())
                empty += int((~mask[:, 1:].any(axis=1)).sum())
                writer.write(ids.astype(np.int32), mask)
        if writer.rows == 0:
            raise DataError(f"{folder}: no rows in {counted(len(files), 'file')}")
        write_json(temporary / _FILES, {"files": firsts, "without_targets": empty, "not_read": sorted(others)})
        writer.finish("train", padded)
    # Only the rename makes the conversion exist: the other processes see all of it or nothing.
    temporary.replace(target)


def _file_rows(
    path: Path, seq_length: int, vocab_size: int, others: set[str]
) -> Iterator[tuple[Ids, npt.NDArray[np.bool_]]]:
    """Rows of a file and their masks; ``others`` gets the names of fields that are not read."""
    for first_line, block in _blocks(path):
        # Arrow parses nearly every block. What it refuses, or what a check refuses, is parsed again line by line:
        # slower, but with the number of the line that is wrong.
        parsed = _parse(block)
        if parsed is None or not _is_sound(*parsed, vocab_size):
            parsed = _parse_slowly(path, first_line, block, vocab_size)
        others |= _other_fields(block)  # of the first line of a block, which is sound by now
        ids, mask, lengths = parsed
        rows, inside = ragged_to_rows(ids, lengths, seq_length, fill=0)
        kept, _ = ragged_to_rows(mask, lengths, seq_length, fill=0)
        real = inside & (kept != 0)
        # Where a long line is cut, what follows its last real token holds nothing.
        pieces = -(-lengths // seq_length)
        wanted = np.asarray(real.any(axis=1))
        # A line keeps its first row even if nothing in it is real: ``RowLocations`` counts rows by the same rule.
        wanted[(np.cumsum(pieces) - pieces)[pieces > 0]] = True
        yield rows[wanted], real[wanted]


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """(1-based number of the first line, whole lines of about ``BLOCK_BYTES``)."""
    with whole_gzip(path) as reached, path.open("rb") as raw:
        stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if path.name.endswith(".gz") else raw
        while block := stream.read(BLOCK_BYTES):
            # The block may have ended inside a line: the rest of that line belongs to it.
            block += stream.readline()
            first_line = reached.number + 1
            lines = block.count(b"\n")
            if first_line == 1:
                block = block.removeprefix(codecs.BOM_UTF8)
            if block and not block.isspace():
                yield first_line, block
            reached.number += lines


def _parse(block: bytes) -> tuple[Ids, Ids, Ids] | None:
    """(ids, mask, lengths), or None if some line does not fit; arrow's parser needs no Python object per token."""
    if not _OBJECT.match(block):  # arrow 26 dies of a block that begins with null
        return None
    try:
        # One block of arrow's for all lines: a line that is longer than a block is an error there.
        table = pa.json.read_json(
            pa.BufferReader(block),
            pa.json.ReadOptions(block_size=len(block) + 1),
            pa.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowException:
        return None
    (ids, lengths), (given, given_lengths), (labels, label_lengths) = (
        _ragged(table.column(name).combine_chunks()) for name in _SCHEMA.names
    )
    # A missing list has length -1: a line may lack the mask, but not the ids.
    has_mask = given_lengths >= 0
    if (lengths < 0).any() or (lengths != given_lengths)[has_mask].any():
        return None
    mask = np.ones_like(ids)
    mask[np.repeat(has_mask, lengths)] = given
    has_labels = label_lengths >= 0
    if (lengths != label_lengths)[has_labels].any():
        return None
    labelled = np.repeat(has_labels, lengths)
    if ((labels != ids[labelled]) & (mask[labelled] != 0)).any():
        return None
    return ids, mask, lengths


def _ragged(column: Any) -> tuple[Ids, Ids]:
    """(values, lengths) of a list column; a missing list has length -1, a missing value is -1."""
    values = column.flatten()
    lengths = np.asarray(column.value_lengths().fill_null(-1), np.int64)
    return np.asarray(values.fill_null(-1), np.int64), lengths


def _is_sound(ids: Ids, mask: Ids, lengths: Ids, vocab_size: int) -> bool:
    if (ids < 0).any() or (ids >= vocab_size).any() or (mask < 0).any() or (mask > 1).any():
        return False
    rises = np.flatnonzero(mask[1:] > mask[:-1]) + 1
    return bool(np.isin(rises, np.cumsum(lengths)).all())  # only where the next line begins


def _parse_slowly(path: Path, first_line: int, block: bytes, vocab_size: int) -> tuple[Ids, Ids, Ids]:
    """Line by line: for masks of true and false, and to name the line that is wrong with a ``DataError``."""
    rows = []
    for number, line in enumerate(block.split(b"\n"), first_line):
        if line.strip():
            row, problem = _row(line, vocab_size)
            if row is None:
                raise DataError(f"{path}:{number}: {problem}")
            rows.append(row)
    flat = [np.array([item for row in rows for item in row[column]], np.int64) for column in (0, 1)]
    return flat[0], flat[1], np.array([len(ids) for ids, _ in rows], np.int64)


def _row(line: bytes, vocab_size: int) -> tuple[tuple[list[int], list[int]] | None, str]:
    """(ids and mask, ""), or (None, what is wrong)."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return None, f"not JSON ({error})"
    except RecursionError:
        return None, "not a row of token ids (it is nested too deeply)"
    problem = _problem(row, vocab_size)
    return (None, problem) if problem else (_values(row), "")


def _values(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    ids = row["input_ids"]
    given = row.get("attention_mask")
    return ids, [1] * len(ids) if given is None else [int(item) for item in given]


def _repeats(labels: list[Any], ids: list[int], mask: list[int] | None) -> bool:
    """Whether labels are the ids themselves, but for padding."""
    real = mask or [1] * len(ids)
    return len(labels) == len(ids) and all(
        it == own or not kept for it, own, kept in zip(labels, ids, real, strict=True)
    )


def _other_fields(block: bytes) -> set[str]:
    """Names of the fields of the first line that are not read."""
    line = block.lstrip().split(b"\n", 1)[0]
    if line.count(b"[") + line.count(b"{") > _MOST_NESTED:
        return set()
    try:  # by arrow, because a line may hold very many numbers
        found = pa.json.read_json(pa.BufferReader(line), pa.json.ReadOptions(block_size=len(line) + 1)).column_names
    except pa.ArrowException:  # it infers one type for each list, and the lines were read by their own rules
        return set()
    return set(found) - set(_SCHEMA.names)


def _problem(row: Any, vocab_size: int) -> str:
    if not isinstance(row, dict):
        return f"a JSON object is expected, found {type(row).__name__}"
    ids = row.get("input_ids")
    # ``type`` and not ``isinstance``: true is an int for Python.
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        return f"input_ids must be a list of whole numbers; fields found: {', '.join(row) or 'none'}"
    mask = row.get("attention_mask")
    known = (0, 1, False, True)
    if mask is not None and (
        not isinstance(mask, list) or len(mask) != len(ids) or any(it not in known for it in mask)
    ):
        return f"attention_mask must be a list of 0 and 1 as long as input_ids ({len(ids)})"
    rise = next((at for at in range(1, len(ids)) if mask and mask[at] > mask[at - 1]), None)
    if rise is not None:
        return (
            f"attention_mask must be ones, then zeros, but is 0 before position {rise}: tokens there would be attended "
            "to all the same. Put the padding behind the text, or leave it out"
        )
    if isinstance(labels := row.get("labels"), list) and not _repeats(labels, ids, mask):
        return (
            "labels are not those of input_ids, and have no effect: every token that is not padding is learned from. "
            "Leave them out, or give a folder of rows with a column labels (task.data.format=rows)"
        )
    wrong = next((item for item in ids if not 0 <= item < vocab_size), None)
    return "" if wrong is None else f"token id {wrong} lies outside the vocabulary of {vocab_size} tokens"
