"""Brings the growing files of a run to S3 while they grow, in immutable segments and one tail that is stored anew."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.runs.replication.log_segments import SEGMENT_BYTES, LogSegment, files_of, segment_key
from sm_llm.storage.s3.swap import read_tagged, swap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from sm_llm.storage.s3_store import S3Store

FOLDERS = ("events/", "logs/")
"""What is uploaded of a run's folder."""
# Uploads of one round, so that its caller comes to its other work while files grow fast.
_ROUND_SEGMENTS = 64


@dataclass
class _Sent:
    """What the store has of one file: bytes ``begin`` to ``end`` are its last segment, with its tag."""

    begin: int = 0
    end: int = 0
    tag: str | None = None

    def has(self, size: int) -> bool:
        """Whether the store has a file of ``size`` bytes whole; also an empty file must be there."""
        return self.end >= size and (self.end > 0 or self.tag is not None)


class LogUploader:
    """Uploads the files below ``root`` that ``chosen`` names. Each has one writer, anywhere.

    A file that the store holds already is continued where that ends, so a process that was killed loses nothing.
    """

    def __init__(self, root: Path, store: S3Store, chosen: Callable[[str], bool] = lambda name: True) -> None:
        self._root = root
        self._store = store
        self._chosen = chosen
        self._sent: dict[str, _Sent] | None = None
        self._given_up: set[str] = set()
        # The file that was uploaded from last.
        self._served = ""

    def upload(self) -> None:
        """Store what is new. Raises ``StorageError`` if the store does not answer; the next call continues from there.

        A file that somebody else writes too is left alone, and reported by the error, once.
        """
        if self._sent is None:
            self._sent = dict(self._stored())
        budget = _ROUND_SEGMENTS
        names = self._names()
        # The files of a round share the budget. Each round begins behind the file that was served last: one that grows
        # as fast as it is uploaded holds up none of the others.
        behind = bisect_right(names, self._served)
        for name in names[behind:] + names[:behind]:
            while budget and name not in self._given_up and self._upload_segment(name, self._sent):
                budget -= 1
                self._served = name

    def upload_all(self) -> None:
        """Upload until nothing is left."""
        while not self.is_done():
            self.upload()

    def is_done(self) -> bool:
        """Whether the store has every byte that the files have now."""
        if self._sent is None:
            return False
        sent = self._sent
        names = (name for name in self._names() if name not in self._given_up)
        return all(sent.get(name, _Sent()).has((self._root / name).stat().st_size) for name in names)

    def _names(self) -> list[str]:
        paths = (path for folder in FOLDERS for path in (self._root / folder).rglob("*") if path.is_file())
        return [
            name for name in sorted(path.relative_to(self._root).as_posix() for path in paths) if self._chosen(name)
        ]

    def _stored(self) -> Iterable[tuple[str, _Sent]]:
        for folder in FOLDERS:
            for name, segments in files_of(self._store.list(folder)).items():
                if segments:
                    last = segments[-1]
                    yield name, _Sent(last.end, last.end) if last.is_full else _Sent(last.begin, last.end, last.tag)

    def _upload_segment(self, name: str, sent: dict[str, _Sent]) -> bool:
        """Store the next bytes of one file; False if there are none."""
        known = sent.setdefault(name, _Sent())
        with (self._root / name).open("rb") as stream:
            # The size first: what is appended after it comes with the next segment.
            size = stream.seek(0, 2)
            if size == known.end and known.has(size):
                return False
            stream.seek(known.begin)
            body = stream.read(SEGMENT_BYTES)
        key = segment_key(name, known.begin)
        # A file that has become shorter is not the one that was uploaded: another process writes it.
        tag = None if size < known.end else swap(self._store, key, body, known.tag)
        if tag is None:
            found = read_tagged(self._store, key)
            if found.tag not in (None, known.tag) and body.startswith(found.body) and size >= known.end:
                # Ours: the answer to an earlier upload was lost, and the file has grown since.
                sent[name] = _Sent(known.begin, known.begin + len(found.body), found.tag)
                return True
            # Left alone from now on: two writers would overwrite each other's bytes.
            self._given_up.add(name)
            raise StorageError(
                f"{self._store.uri}: {name!r} is written by another process too; its copy is not updated"
            )
        segment = LogSegment(known.begin, len(body), tag)
        sent[name] = _Sent(segment.end, segment.end) if segment.is_full else _Sent(segment.begin, segment.end, tag)
        return True
