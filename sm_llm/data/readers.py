"""Readers: documents out of files of every supported kind, with the rejected ones counted by reason."""

from __future__ import annotations

import gzip
import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

from sm_llm.data.describe import STATE, is_dataset, read_json
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUILTIN_PREFIX = "builtin:"
BATCH_DOCUMENTS = 1024
BATCH_BYTES = 8_000_000
"""A batch of documents ends at whichever comes first; so memory is bounded by this or by the longest document."""


@dataclass
class Rejections:
    """Documents that could not be used: how many for each reason, and where the first one was."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, place)


@dataclass(frozen=True)
class Documents:
    """A batch of documents of one file. ``lines`` are 1-based lines, rows or sections; ``fraction`` of it is read."""

    texts: list[str]
    sizes: list[int]
    """UTF-8 bytes of each text."""
    file: str
    lines: list[int]
    fraction: float


@dataclass(frozen=True)
class SourceFile:
    """One file (or saved dataset, or builtin text) to read; ``size`` in bytes on disk."""

    path: Path
    kind: str
    size: int

    def documents(self, text_field: str, rejections: Rejections) -> Iterator[Documents]:
        """The usable documents in order. Raises ``DataError`` if no row has ``text_field`` or the file is broken."""
        collector = _Collector(str(self.path), rejections)
        for line, value, fraction in READERS[self.kind](self.path, text_field, collector):
            if batch := collector.add(line, value, fraction):
                yield batch
        collector.check_field(text_field)
        if last := collector.flush(1.0):
            yield last


class Reader(Protocol):
    """Yields (1-based line or row, value of the text field, fraction of the file read); reports bad rows itself."""

    def __call__(self, path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]: ...


class _Collector:
    """Gathers usable texts into batches and counts the others."""

    def __init__(self, file: str, rejections: Rejections) -> None:
        self._file = file
        self._rejections = rejections
        self._texts: list[str] = []
        self._sizes: list[int] = []
        self._lines: list[int] = []
        self._bytes = 0
        self._field_seen = False
        self._without_field: tuple[int, list[str]] | None = None

    def add(self, line: int, value: Any, fraction: float) -> Documents | None:
        """Take one value of the text field; returns a batch when one is full."""
        self._field_seen = True
        size, reason = _usable(value)
        if reason:
            self.reject(reason, line)
            return None
        self._texts.append(value)
        self._sizes.append(size)
        self._lines.append(line)
        self._bytes += size
        full = len(self._texts) >= BATCH_DOCUMENTS or self._bytes >= BATCH_BYTES
        return self.flush(fraction) if full else None

    def reject(self, reason: str, line: int) -> None:
        self._rejections.add(reason, f"{self._file}:{line}")

    def missing_field(self, line: int, fields: list[str]) -> None:
        self.reject("missing_field", line)
        self._without_field = self._without_field or (line, fields)

    def check_field(self, text_field: str) -> None:
        """A field that is never there is a mistake in the specification, not in single rows."""
        if self._field_seen or self._without_field is None:
            return
        line, fields = self._without_field
        raise DataError(
            f"{self._file}:{line}: no field {text_field!r} here or in any row of this file; "
            f"fields found: {', '.join(fields) or 'none'}. Set task.text_field to the one that holds the text"
        )

    def flush(self, fraction: float) -> Documents | None:
        if not self._texts:
            return None
        batch = Documents(self._texts, self._sizes, self._file, self._lines, fraction)
        self._texts, self._sizes, self._lines, self._bytes = [], [], [], 0
        return batch


def _usable(value: Any) -> tuple[int, str | None]:
    """(UTF-8 bytes, None), or (0, reason why this is no document)."""
    if value is None:
        return 0, "null"
    if not isinstance(value, str):
        return 0, "not_text"
    if not value or value.isspace():
        return 0, "empty"
    if value.isascii():
        return len(value), None
    try:
        return len(value.encode("utf-8")), None
    except UnicodeEncodeError:  # a lone surrogate from a JSON escape; no tokenizer takes it
        return 0, "not_unicode"


def _read_text(path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]:
    try:
        yield 1, path.read_text(encoding="utf-8-sig"), 1.0
    except UnicodeDecodeError:
        collector.reject("not_utf8", 1)


def _read_jsonl(path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]:
    with path.open("rb") as raw:
        yield from _json_lines(raw, raw, path, text_field, collector)


def _read_jsonl_gz(path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]:
    with path.open("rb") as raw, gzip.open(raw) as stream:
        try:
            yield from _json_lines(cast("BinaryIO", stream), raw, path, text_field, collector)
        except (EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: not a whole gzip file ({error}). Fetch it again") from error


def _json_lines(
    stream: BinaryIO, raw: BinaryIO, path: Path, text_field: str, collector: _Collector
) -> Iterator[tuple[int, Any, float]]:
    size = max(path.stat().st_size, 1)
    for number, line in enumerate(stream, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError:  # also UnicodeDecodeError
            collector.reject("invalid_json", number)
            continue
        if not isinstance(row, dict):
            collector.reject("null" if row is None else "not_an_object", number)
        elif text_field not in row:
            collector.missing_field(number, list(row))
        else:
            yield number, row[text_field], raw.tell() / size


def _read_parquet(path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, text_field)
            batches = file.iter_batches(BATCH_DOCUMENTS, columns=[text_field])
            yield from _column_values(batches, file.metadata.num_rows)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable parquet file ({error}). Fetch it again") from error


def _read_dataset(path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]:
    import pyarrow as pa

    state = read_json(path / STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{path}: saved with an indices mapping; call flatten_indices() before save_to_disk()")
    first = 0
    files = [path / entry["filename"] for entry in state["_data_files"]]
    for number, file in enumerate(files):
        try:
            stream = pa.ipc.open_stream(pa.memory_map(str(file), "r"))
            _check_column(file, stream.schema, text_field)
            for line, value, _ in _column_values((batch.select([text_field]) for batch in stream), None):
                yield first + line, value, (number + 0.5) / len(files)
                last = first + line
            first = last
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file}: not a readable Arrow stream file ({error})") from error


def _column_values(batches: Iterator[Any], total: int | None) -> Iterator[tuple[int, Any, float]]:
    """(1-based row, value, fraction) of the only column of Arrow record batches."""
    row = 0
    for batch in batches:
        for value in batch.column(0).to_pylist():
            row += 1
            yield row, value, row / total if total else 1.0


def _check_column(path: Path, schema: Any, text_field: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"{path}: no column {text_field!r}; columns found: {', '.join(schema.names)}. "
            "Set task.text_field to the one that holds the text"
        )
    found = str(schema.field(text_field).type)
    if found not in ("string", "large_string", "string_view", "null"):
        raise DataError(f"{path}: column {text_field!r} holds {found}, not text")


def _read_python_docs(path: Path, text_field: str, collector: _Collector) -> Iterator[tuple[int, Any, float]]:
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

SUFFIXES = tuple(sorted((kind for kind in READERS if kind.startswith(".")), key=len, reverse=True))


def find_files(sources: list[str], notice: Callable[[str], None]) -> list[SourceFile]:
    """Every readable file of the sources, folders walked recursively in order of path.

    Files of other kinds inside a folder are left out and told through ``notice``; a source with nothing readable
    is a ``DataError`` that lists what was found and what can be read.
    """
    return [file for source in sources for file in _of_source(source, notice)]


def _of_source(source: str, notice: Callable[[str], None]) -> list[SourceFile]:
    if source.startswith(BUILTIN_PREFIX):
        return [_builtin(source)]
    path = Path(source.removeprefix("file://"))
    if not path.exists():
        raise DataError(f"{source}: no such file or folder")
    if path.is_file():
        return [_single(path)]
    return _folder(path, notice)


def _builtin(source: str) -> SourceFile:
    if source not in READERS:
        known = ", ".join(kind for kind in READERS if kind.startswith(BUILTIN_PREFIX))
        raise DataError(f"{source}: no such built-in text; there is {known}")
    return SourceFile(Path(source), source, 465_000)


def _single(path: Path) -> SourceFile:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: cannot read this kind of file; readable are {', '.join(sorted(SUFFIXES))}")
    return SourceFile(path, kind, path.stat().st_size)


def _folder(folder: Path, notice: Callable[[str], None]) -> list[SourceFile]:
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(read_json(folder / "dataset_dict.json").get("splits", []))
        raise DataError(f"{folder}: a saved dataset with several splits ({splits}); name one, e.g. {folder}/train")
    if is_dataset(folder):
        return [SourceFile(folder, "dataset", sum(p.stat().st_size for p in folder.glob("*.arrow")))]
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _hidden(path, folder)]
    files = [_single(path) for path in paths if _kind(path)]
    others = sorted({path.suffix or path.name for path in paths if not _kind(path)})
    if not files:
        found = f"{len(paths)} files of other kinds ({', '.join(others)})" if paths else "nothing"
        raise DataError(f"{folder}: {found} found; readable are {', '.join(sorted(SUFFIXES))}")
    if others:
        notice(f"{folder}: {len(paths) - len(files)} files of other kinds left out ({', '.join(others)})")
    return files


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _kind(path: Path) -> str | None:
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
