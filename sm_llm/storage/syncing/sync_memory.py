"""What earlier syncs verified, so that the next one need not read or ask again, and which files they had begun.

A cache: losing it costs time, and maybe disk.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sm_llm.owned import cache_folder, opener, private_folder
from sm_llm.storage.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from sm_llm.storage.base import StoredObject


class SyncMemory:
    """Per key: the store's tag and the local file's identity at a moment when both were known to be equal.

    The identity contains the change time, which no program can set back: a file that was altered is seen as altered
    whatever its size and time are.
    """

    def __init__(self, folder: Path, uri: str, environ: Mapping[str, str] = os.environ) -> None:
        name = hashlib.sha256(f"{folder.absolute()}\n{uri}".encode()).hexdigest()[:32]
        self._file = cache_folder(environ) / "sync" / f"{name}.json"
        found = self._read()
        self._entries: dict[str, list[str]] = found.get("equal", {})
        # Keys of which something half-fetched may lie in the folder.
        self.begun: set[str] = set(found.get("begun", ()))

    def _read(self) -> dict[str, Any]:
        try:
            private_folder(self._file.parents[1])  # no other user may record what was verified
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @contextmanager
    def begin(self, keys: Iterable[str]) -> Iterator[None]:
        """While this lasts ``keys`` are being fetched; that they were is known even if this process is killed."""
        self.begun.update(keys)
        self.save()
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other process is fetching between these two places, as long as this lasts."""
        with self._locked(fcntl.LOCK_EX) as locked:
            yield locked

    @contextmanager
    def _locked(self, kind: int) -> Iterator[bool]:
        lock: int | None = None
        try:
            lock = opener(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            locked = True
        except OSError:
            # Also where locks do not work: then nobody is ever alone, and leftovers stay.
            locked = False
        try:
            yield locked
        finally:
            if lock is not None:
                os.close(lock)

    def are_equal(self, remote: StoredObject, local: StoredObject) -> bool:
        """Whether both are as they were when they were equal."""
        entry = self._entries.get(remote.key)
        return entry is not None and bool(remote.tag) and entry[:2] == [remote.tag, local.tag]

    def checksum(self, remote: StoredObject) -> str | None:
        """The CRC64NVME of an object that is as it was then."""
        entry = self._entries.get(remote.key)
        return entry[2] if entry is not None and remote.tag and entry[0] == remote.tag and entry[2] else None

    def note(self, remote: StoredObject, local: StoredObject, checksum: str) -> None:
        """Remember that they are equal now."""
        if remote.tag and local.tag:
            self._entries[remote.key] = [remote.tag, local.tag, checksum]

    def save(self) -> None:
        """Keep it; where that cannot be done the next sync compares by content."""
        try:
            private_folder(self._file.parents[1])
            write_atomically(self._file, json.dumps({"equal": self._entries, "begun": sorted(self.begun)}))
        except OSError:
            return
