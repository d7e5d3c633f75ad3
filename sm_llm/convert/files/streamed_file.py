"""A safetensors file in S3 as one on this machine: its header is here, and its tensors come by ranges."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from sm_llm.models.safetensors_folder import LONGEST_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sm_llm.storage.engines.ranged_object import RangedObject

_LENGTH_BYTES = 8


class StreamedFile:
    """``path`` is a file of the object's size with its header, and a hole in place of all tensors but those kept.

    So whatever reads headers reads this one. Raises ``OSError``, and ``StorageError`` where S3 does not answer.
    """

    def __init__(self, path: Path, remote: RangedObject) -> None:
        self.path, self._remote = path, remote
        self._lock = threading.Lock()
        # One lock for each range, so that threads wait for the one that fetches what they need, and for no other.
        self._kept: dict[tuple[int, int], threading.Lock] = {}
        self._is_there: set[tuple[int, int]] = set()
        head = remote.read(0, min(_LENGTH_BYTES, remote.size))
        length = int.from_bytes(head, "little")
        # A length that cannot be true is left to whoever reads the header.
        if length <= min(remote.size - _LENGTH_BYTES, LONGEST_HEADER):
            head += remote.read(_LENGTH_BYTES, _LENGTH_BYTES + length)
        with path.open("wb") as stream:
            stream.write(head)
            stream.truncate(remote.size)

    @property
    def identity(self) -> list[str | int]:
        """Size and entity tag: what changes when the object does."""
        return [self._remote.size, self._remote.tag]

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes ``[begin, end)``, from S3."""
        return self._remote.pieces(begin, end)

    def keep(self, begin: int, end: int) -> None:
        """Put bytes ``[begin, end)`` into their place in the file, once: for what is read in many small parts."""
        with self._lock:
            lock = self._kept.setdefault((begin, end), threading.Lock())
        with lock:
            if (begin, end) in self._is_there:
                return
            position = begin
            # Not by the stream that made the file: several threads write to it, each at its own place.
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                for piece in self._remote.pieces(begin, end):
                    while piece:
                        count = os.pwrite(descriptor, piece, position)
                        piece, position = piece[count:], position + count
            finally:
                os.close(descriptor)
            self._is_there.add((begin, end))
