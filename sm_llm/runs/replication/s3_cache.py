"""Keeps a local copy of a run's growing files as S3 holds them, so that everything reads them from a folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.owned import make_folders, opener
from sm_llm.runs.replication.log_segments import LogSegment, files_of, segment_key
from sm_llm.runs.run_lock import exclusive
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.files import write_atomically
from sm_llm.storage.s3.swap import read_tagged
from sm_llm.storage.stored_names import report_unknown

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.storage.s3_store import S3Store

_INDEX = ".mirror.json"


class S3Cache:
    """The files below ``root`` that were fetched from ``store``, and under which tags, which an index remembers."""

    def __init__(self, root: Path, store: S3Store) -> None:
        self._root = root
        self._store = store

    def refresh(self, prefix: str, wanted: Callable[[str], bool]) -> None:
        """Make every file below ``prefix`` that is ``wanted`` what the store has now: one listing, then what changed.

        Files only ever grow, so whoever reads one meanwhile sees a beginning of it. Raises ``StorageError`` if the
        store does not answer: an old copy is never passed off as the present.
        """
        listed = files_of(self._store.list(prefix))
        files = {name: it for name, it in listed.items() if RunPaths.is_growing(name) and wanted(name)}
        report_unknown(self._store.uri, (name for name in listed if not RunPaths.is_growing(name)))
        if not files:
            return
        # Several commands on this machine may follow one run, and share its folder.
        with exclusive(self._root / f"{_INDEX}.lock"):
            index = self._read_index()
            changed = {name: it for name, it in files.items() if not self._is_same(name, it, index.get(name))}
            for name, segments in changed.items():
                index[name] = self._fetch(name, segments, index.get(name, []))
            if changed:
                text = json.dumps({name: [asdict(it) for it in segments] for name, segments in index.items()})
                write_atomically(self._root / _INDEX, text)

    def _is_same(self, name: str, segments: list[LogSegment], held: list[LogSegment] | None) -> bool:
        return segments == held and self._size(name) == (segments[-1].end if segments else -1)

    def _fetch(self, name: str, segments: list[LogSegment], held: list[LogSegment]) -> list[LogSegment]:
        """Write what differs from ``held``; returns what the file consists of now."""
        path = self._root / name
        make_folders(path.parent)
        same = 0
        size = self._size(name)
        # What is full and unchanged is not fetched again, unless somebody has cut the local file.
        while same < min(len(segments), len(held)) and segments[same] == held[same] and held[same].end <= size:
            same += 1
        found = segments[:same]
        descriptor = opener(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            for segment in segments[same:]:
                now = read_tagged(self._store, segment_key(name, segment.begin))
                if now.tag is None:
                    raise StorageError(f"{self._store.uri}: {name!r} was deleted while it was read")
                # In place and not by a rename: only what is new is written, and meanwhile a reader sees a beginning of
                # the file.
                os.pwrite(descriptor, now.body, segment.begin)
                found.append(LogSegment(segment.begin, len(now.body), now.tag))
                if now.tag != segment.tag:
                    break  # it has grown since the listing, which may not know the next ones
            # What lies behind the last segment is of an earlier state: the store's file is shorter.
            os.ftruncate(descriptor, found[-1].end if found else 0)
        finally:
            os.close(descriptor)
        return found

    def _size(self, name: str) -> int:
        try:
            return (self._root / name).stat().st_size
        except FileNotFoundError:
            return -1

    def _read_index(self) -> dict[str, list[LogSegment]]:
        """What was fetched before; an index that cannot be read makes all of it be fetched again."""
        try:
            value = json.loads((self._root / _INDEX).read_text(encoding="utf-8"))
            return {name: [LogSegment(**it) for it in segments] for name, segments in value.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
