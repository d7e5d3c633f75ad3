"""A file that is written once, from begin to end: past the page cache where the file system can do that.

Pages of the cache that are allocated, filled, written and dropped again took half of the processor's time of a
conversion, and a conversion has no use for them: it reads nothing of what it writes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from sm_llm.storage.files import drop_cache

if TYPE_CHECKING:
    from pathlib import Path

_BUFFER_BYTES = 2 << 20
"""Of each file that is open. The device gets so many bytes at a time."""
_BLOCK = 4096
"""Writes past the page cache are of whole blocks, at multiples of their size, from memory that is aligned likewise."""
_LEAST_DIRECT = 1 << 16
# A flush at the end would wait for all of it, a few bytes are not worth a call each.
_LEAST_EARLY = 1 << 20
# One buffer for the next file of this thread: a new one costs the kernel as much as writing it.
_spare = threading.local()


class AppendedFile:
    """A new file; it must not exist yet. Raises ``OSError``. The caller flushes and renames it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._buffer = _take_buffer()
        self._filled = self._written = 0
        self._is_direct = self._set_direct(True)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._written + self._filled

    def write(self, piece: bytes | memoryview) -> None:
        """Append bytes."""
        source, at = np.frombuffer(piece, np.uint8), 0
        while at < len(source):
            count = min(len(source) - at, _BUFFER_BYTES - self._filled)
            # By numpy, which lets other threads run meanwhile.
            self._buffer[self._filled : self._filled + count] = source[at : at + count]
            self._filled, at = self._filled + count, at + count
            if self._filled == _BUFFER_BYTES:
                self._write_out()

    def close(self) -> int:
        """Write what is left; returns the size of the file."""
        if self._is_direct and self._filled >= _LEAST_DIRECT:
            self._write_out()
        # What is left now is no whole block.
        if self._is_direct and self._filled:
            self._is_direct = self._set_direct(False)
        self._write_out()
        self.abort()
        return self._written

    def abort(self) -> None:
        """Close the file as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _spare.buffer = self._buffer

    def _write_out(self) -> None:
        """Write what the buffer holds; past the page cache, whole blocks of it."""
        begin, at, end = self._written, 0, self._filled
        while self._is_direct and at < (blocks := end - end % _BLOCK):
            try:
                at += os.pwrite(self._descriptor, self._buffer[at:blocks].data, begin + at)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system takes the flag, and no such writes; the rest goes through the page cache.
                self._is_direct = self._set_direct(False)
        while not self._is_direct and at < end:
            at += os.pwrite(self._descriptor, self._buffer[at:end].data, begin + at)
        if not self._is_direct and at >= _LEAST_EARLY:
            drop_cache(self._descriptor, begin, at)  # begins to write it to the device
        self._written = begin + at
        self._filled = end - at
        self._buffer[: self._filled] = self._buffer[at:end]

    def _set_direct(self, is_wanted: bool) -> bool:
        """Leave the page cache out, or not; returns whether it is left out."""
        # Systems other than Linux have no such flag.
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~flag
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag if is_wanted else flags)
        except OSError:
            return False
        return is_wanted and flag != 0


def _take_buffer() -> Any:
    held, _spare.buffer = getattr(_spare, "buffer", None), None
    # From ``mmap``, since it begins at a page.
    return np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8) if held is None else held
