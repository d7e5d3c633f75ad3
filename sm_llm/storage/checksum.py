"""CRC64NVME, the checksum S3 keeps of every object, of bytes and of files."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, reduce
from typing import TYPE_CHECKING

from sm_llm.storage.files import drop_cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO
    from pathlib import Path

CHUNK_BYTES = 1 << 18
"""Bytes read at a time: enough for full speed, little enough to stay in the processor's cache."""

PIECE_BYTES = 64 << 20
"""Files larger than this are read in pieces of this size, a few at once."""

_READERS = 4


_IMPORTING = threading.Lock()


def _crc64nvme() -> Callable[[bytes | memoryview, int], int]:
    # awscrt's modules import each other in a circle: a second thread could see one that is half imported.
    with _IMPORTING:
        return _import_crc64nvme()


@cache
def _import_crc64nvme() -> Callable[[bytes | memoryview, int], int]:
    from awscrt.checksums import crc64nvme

    return crc64nvme  # type: ignore[no-any-return]


class Crc64:
    """A running CRC64NVME; ``hexdigest`` is 16 lower-case hex digits (the empty input gives zeros)."""

    def __init__(self) -> None:
        self.value = 0
        self._crc64nvme = _crc64nvme()

    def update(self, data: bytes | memoryview) -> None:
        self.value = self._crc64nvme(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:016x}"


def crc64_bytes(data: bytes) -> str:
    """CRC64NVME of ``data`` as 16 hex digits."""
    crc = Crc64()
    crc.update(data)
    return crc.hexdigest()


def crc64_file(path: Path, *, from_disk: bool = False) -> str:
    """CRC64NVME of a file as 16 hex digits; a large one is read by several threads.

    ``from_disk`` first asks the kernel to forget its cached pages, so that the bytes come from the device (as far
    as the file system allows). Raises ``OSError``.
    """
    # Unbuffered: ``readinto`` fills our own buffer, and a second copy of the bytes would cost time.
    with path.open("rb", buffering=0) as stream:
        if from_disk:
            drop_cache(stream.fileno())
        size = os.fstat(stream.fileno()).st_size
        if size <= PIECE_BYTES:
            return f"{_read_piece(stream)[0]:016x}"
    starts = range(0, size, PIECE_BYTES)
    with ThreadPoolExecutor(min(_READERS, len(starts)), thread_name_prefix="checksum") as pool:
        pieces = list(pool.map(partial(_piece_at, path), starts))
    return f"{reduce(_join, pieces)[0]:016x}"


def _piece_at(path: Path, start: int) -> tuple[int, int]:
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        return _read_piece(stream)


def _read_piece(stream: FileIO) -> tuple[int, int]:
    """CRC64NVME and length of the next ``PIECE_BYTES``, or of what is left."""
    crc, left = Crc64(), PIECE_BYTES
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := stream.readinto(buffer[: min(left, CHUNK_BYTES)]):
        crc.update(buffer[:count])
        left -= count
    return crc.value, PIECE_BYTES - left


def _join(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    from awscrt.checksums import combine_crc64nvme

    # The CRC of a whole follows from those of its pieces and the length of the second: no byte is read again.
    return combine_crc64nvme(first[0], second[0], second[1]), first[1] + second[1]
