"""A glance at line files that lie here, without reading them all: for a plan, which has no time for more."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING

from sm_llm.data.prepare.source_files import is_hidden
from sm_llm.runs.run_folders import files_outside_runs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LINE_SUFFIXES = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
_LINES = 256
_LINE_BYTES = 1_000_000


def line_paths(folder: Path) -> list[Path]:
    """The line files of a folder, in the order in which they are read."""
    found = files_outside_runs(folder)[0]
    return [path for path in found if path.name.endswith(LINE_SUFFIXES) and not is_hidden(path, folder)]


def repeats_one_row(folder: Path, seq_length: int) -> int | None:
    """How many of the first lines there are, if all are the same row; None if they differ or cannot be read.

    A long line alone is several rows.
    """
    first, count = None, 0
    try:
        for line in _first_lines(folder):
            if first is not None and line != first:
                return None
            first, count = line, count + 1
        if first is None or (count == 1 and len(json.loads(first)["input_ids"]) > seq_length):
            return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError):
        return None  # the worker reports what is wrong with it, by file and line
    return count


def _first_lines(folder: Path) -> Iterator[bytes]:
    left = _LINES
    for path in line_paths(folder):
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
            while left and (line := stream.readline(_LINE_BYTES)):
                if line.strip():
                    left -= 1
                    yield line.strip()
