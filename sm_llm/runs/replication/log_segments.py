"""How a file that grows is kept in S3, which cannot append: as objects named by the byte they begin at.

``events/attempt-1-rank0.jsonl`` is stored as ``events/attempt-1-rank0.jsonl/000000000000``, ``…/000000262144`` and so
on. All but the last are full and never change again; the last is stored anew when the file has grown. One after the
other they are the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sm_llm.storage.base import StoredObject

SEGMENT_BYTES = 1 << 18
"""Size of a full segment; what one upload carries at most."""
_KEY = re.compile(r"(?P<name>.+)/(?P<begin>[0-9]{12,18})", re.DOTALL)


@dataclass(frozen=True)
class LogSegment:
    """One object of a file: bytes ``begin`` to ``end`` of it, under a ``tag`` that changes with them."""

    begin: int
    size: int
    tag: str

    @property
    def end(self) -> int:
        return self.begin + self.size

    @property
    def is_full(self) -> bool:
        return self.size >= SEGMENT_BYTES


def segment_key(name: str, begin: int) -> str:
    """The key of the segment of file ``name`` (its path below the run's folder) that begins at a byte."""
    return f"{name}/{begin:012d}"


def files_of(objects: Iterable[StoredObject]) -> dict[str, list[LogSegment]]:
    """File -> its segments in order, up to the first gap: what lies behind one is of another writer."""
    found: dict[str, list[LogSegment]] = {}
    for it in objects:
        if match := _KEY.fullmatch(it.key):
            found.setdefault(match["name"], []).append(LogSegment(int(match["begin"]), it.size, it.tag or ""))
    return {name: _connected(sorted(segments, key=lambda it: it.begin)) for name, segments in found.items()}


def _connected(segments: list[LogSegment]) -> list[LogSegment]:
    kept: list[LogSegment] = []
    for segment in segments:
        # Segments are stored in order by one writer, so a gap is not ours.
        if segment.begin != (kept[-1].end if kept else 0):
            break
        kept.append(segment)
    return kept
