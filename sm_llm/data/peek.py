"""A glance at line files that lie here, without reading them all: for a plan, which has no time for more."""

from __future__ import annotations

import codecs
import gzip
import json
from typing import TYPE_CHECKING

from sm_llm.data.compressed import whole_gzip
from sm_llm.data.prepare.source_files import is_hidden
from sm_llm.errors import DataError
from sm_llm.runs.run_folders import files_outside_runs
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

LINE_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
_LINES = 256
_LINE_BYTES = 1_000_000


def line_files(folder: Path) -> list[Path]:
    """The line files of a folder, in the order in which they are read. Raises ``DataError``."""
    if not folder.is_dir():
        is_file = folder.is_file()
        raise DataError(f"{folder}: {'a file; name its folder' if is_file else 'no such folder of line files'}")
    paths = files_outside_runs(folder)[0]
    found = [path for path in paths if path.name.endswith(LINE_SUFFIXES) and not is_hidden(path, folder)]
    if not found:
        hidden = [path for path in paths if is_hidden(path, folder)]
        others = sorted({path.suffix or path.name for path in paths if path not in hidden})
        left_out = f"; left out: {counted(len(hidden), 'file')} whose path has a name with . or _ in front"
        raise DataError(
            f"{folder}: no file ends in {', '.join(LINE_SUFFIXES)} (found: {', '.join(others) or 'nothing'}"
            f"{left_out if hidden else ''})"
        )
    return found


def assert_line_rows(folder: Path) -> None:
    """Raise ``DataError`` for a folder without line files, without a line, or whose first line is not a row."""
    files = line_files(folder)
    for path, number, line in _first_lines(files):
        try:
            is_row = isinstance(json.loads(line)["input_ids"], list)
        except (ValueError, KeyError, TypeError, RecursionError):
            # Of a longer line only the beginning was read.
            is_row = len(line) >= _LINE_BYTES - 1
        if not is_row:
            raise DataError(f"{path}:{number}: is not a row: a JSON object with a list input_ids is expected")
        return
    raise DataError(f"{folder}: {counted(len(files), 'line file')} without a line")


def repeats_one_row(folder: Path, seq_length: int) -> int | None:
    """How many of the first lines there are, if all are the same row; None if they differ or cannot be read.

    A long line alone is several rows.
    """
    first, count = None, 0
    try:
        for _, _, line in _first_lines(line_files(folder)):
            if first is not None and line != first:
                return None
            first, count = line, count + 1
        if first is None or (count == 1 and len(json.loads(first)["input_ids"]) > seq_length):
            return None
    except (DataError, ValueError, KeyError, TypeError, RecursionError):
        return None  # the worker reports what is wrong with it, by file and line
    return count


def _first_lines(files: Iterable[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """File, number and text of the first lines that are not blank. Raises ``DataError``."""
    left = _LINES
    for path in files:
        try:
            with (
                whole_gzip(path) as at,
                gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream,
            ):
                while left and (line := stream.readline(_LINE_BYTES)):
                    at.number += 1
                    if text := line.removeprefix(codecs.BOM_UTF8).strip():
                        left -= 1
                        yield path, at.number, text
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
