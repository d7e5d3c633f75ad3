"""Readers: the text of every kind of file, one function for each."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from sm_llm.data.compressed import whole_gzip
from sm_llm.data.describe import data_files
from sm_llm.data.prepare.documents import BATCH_DOCUMENTS, LongText
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sm_llm.data.prepare.documents import Collector


class Reader(Protocol):
    """Yields (1-based line or row, value of the text field, fraction of the file read); reports bad rows itself."""

    def __call__(self, path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]: ...


LONG_BYTES = 8_000_000
"""A text file of more than this is read in parts."""
_PART_CHARACTERS = 1 << 20


def _read_text(path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]:
    try:
        if path.stat().st_size <= LONG_BYTES:
            yield 1, path.read_text(encoding="utf-8-sig"), 1.0
            return
        # The whole file is decoded once before it is used: a document with an error in its last part is rejected as a
        # whole.
        size, is_blank = 0, True
        for part in _text_parts(path):
            size += len(part.encode("utf-8"))
            is_blank = is_blank and part.isspace()
    except UnicodeDecodeError:
        collector.reject("not_utf8", 1)
        return
    if is_blank:
        collector.reject("empty", 1)
    else:
        yield 1, LongText(partial(_text_parts, path), size), 1.0


def _text_parts(path: Path) -> Iterator[str]:
    """The text of a file in pieces; each ends with a line, unless lines are very long."""
    with path.open(encoding="utf-8-sig") as stream:
        while part := stream.read(_PART_CHARACTERS):
            yield part + stream.readline(_PART_CHARACTERS)


def _read_jsonl(path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]:
    with path.open("rb") as raw:
        yield from _json_lines(raw, raw, path, text_field, collector)


def _read_jsonl_gz(path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]:
    with path.open("rb") as raw, gzip.open(raw) as stream, whole_gzip(path) as reached:
        for found in _json_lines(cast("BinaryIO", stream), raw, path, text_field, collector):
            reached.number = found[0]
            yield found


def _json_lines(
    stream: BinaryIO, raw: BinaryIO, path: Path, text_field: str, collector: Collector
) -> Iterator[tuple[int, Any, float]]:
    size = max(path.stat().st_size, 1)
    for number, line in enumerate(stream, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # also UnicodeDecodeError
            collector.reject("invalid_json", number)
            continue
        if not isinstance(row, dict):
            collector.reject("null" if row is None else "not_an_object", number)
        elif text_field not in row:
            collector.missing_field(number, list(row))
        else:
            # ``raw`` and not ``stream``: the position in the compressed file, as ``size`` is that of the compressed
            # file.
            yield number, row[text_field], raw.tell() / size


def _read_parquet(path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, text_field)
            # Other columns are never decoded.
            batches = file.iter_batches(BATCH_DOCUMENTS, columns=[text_field])
            for row, value in enumerate(_column_values(batches), 1):
                yield row, value, row / file.metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({error}). Fetch it again") from error


def _read_dataset(path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]:
    import pyarrow as pa

    rows = count(1)
    files = data_files(path)
    for number, file in enumerate(files):
        try:
            stream = pa.ipc.open_stream(pa.memory_map(str(file), "r"))
            _check_column(file, stream.schema, text_field)
            for value in _column_values(batch.select([text_field]) for batch in stream):
                # An Arrow stream does not state its number of rows: all of a file counts as its middle.
                yield next(rows), value, (number + 0.5) / len(files)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file}: not a readable Arrow stream file ({error})") from error


def _column_values(batches: Iterator[Any]) -> Iterator[Any]:
    """The values of the only column of Arrow record batches."""
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _check_column(path: Path, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"{path}: no column {text_field!r}; columns found: {', '.join(schema.names)}. "
            "Set task.text_field to the one that holds the text"
        )
    found = str(schema.field(text_field).type)
    # A column in which every value is null has this type; its rows are rejected one by one.
    if found not in ("string", "large_string", "string_view", "null"):
        raise DataError(f"{path}: column {text_field!r} holds {found}, not text")


def _read_python_docs(path: Path, text_field: str, collector: Collector) -> Iterator[tuple[int, Any, float]]:
    """Sections of the language reference that comes with every CPython (PSF licence).

    A section starts at an underlined line or at the signature of a function; sections, not whole entries, are
    the documents, so that a small held-out share still samples many subjects.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    sections = [part for name in sorted(topics) for part in _SECTION.split(topics[name]) if part.strip()]
    for number, section in enumerate(sections, 1):
        yield number, section, number / len(sections)


_SECTION = re.compile(r"^(?=\S[^\n]*\n[*=~\-]{4,}\n|[\w.]+\([^\n]*\)\n\n   )", re.MULTILINE)

READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl_gz,
    ".parquet": _read_parquet,
    "dataset": _read_dataset,
    "builtin:python-docs": _read_python_docs,
}
"""Reader of each kind: a file suffix, a saved dataset, or a text that is built in."""
