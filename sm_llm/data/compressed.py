"""Reading gzip files: one that is damaged anywhere is the data's fault, with its name."""

from __future__ import annotations

import gzip
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sm_llm.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class DamagedGzip(DataError):
    """A gzip file that cannot be read to its end."""

    remedy = "Fetch it again, or leave it out"

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. {self.remedy}")
        self.problem = problem


class Line:
    """Number of the line that was read last."""

    number = 0


@contextmanager
def whole_gzip(path: Path) -> Iterator[Line]:
    """Turn whatever a truncated, altered or foreign file raises into ``DamagedGzip``, which states how far it was read.

    The block keeps ``Line.number`` up to date.
    """
    line = Line()
    try:
        yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedGzip(f"{path}: not a whole gzip file (after line {line.number:,}: {error})") from error
