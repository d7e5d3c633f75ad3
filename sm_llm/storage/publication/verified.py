"""Remembers which local files were compared with their checksums, so that nobody reads them again for it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sm_llm.storage.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path


class Verified:
    """A marker file beside the data. A file counts while size, inode and the times of its last changes are the same.

    No program can set a change time back, and only whole, flushed files are noted: one that was altered, replaced or
    half-written does not count. A marker that cannot be read counts for nothing.
    """

    def __init__(self, marker: Path | None) -> None:
        self._marker = marker
        self._entries: dict[str, list[str]] = {}
        if marker is not None:
            try:
                found = json.loads(marker.read_text(encoding="utf-8"))
                self._entries = found if isinstance(found, dict) else {}
            except (OSError, ValueError):
                self._entries = {}

    def holds(self, path: Path, checksum: str) -> bool:
        """Whether ``path`` is the file that was found to have this checksum."""
        try:
            return self._entries.get(str(path)) == [checksum, _identity(path)]
        except OSError:
            return False

    def note(self, path: Path, checksum: str) -> None:
        """``path``, on disk now, has this checksum. Raises ``OSError``."""
        self._entries[str(path)] = [checksum, _identity(path)]

    def save(self) -> None:
        """Write the marker. Raises ``OSError``."""
        if self._marker is not None:
            write_atomically(self._marker, json.dumps(self._entries))


def _identity(path: Path) -> str:
    """What changes where a file is written again. Raises ``OSError``."""
    found = path.stat()
    return f"{found.st_size} {found.st_ino} {found.st_mtime_ns} {found.st_ctime_ns}"
