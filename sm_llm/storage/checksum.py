"""CRC64NVME, the checksum S3 keeps of every object, of bytes and of files."""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING

from sm_llm.storage.files import drop_cache

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK_BYTES = 1 << 18
"""Bytes read at a time: enough for full speed, little enough to stay in the processor's cache."""


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
        self._value = 0
        self._crc64nvme = _crc64nvme()

    def update(self, data: bytes | memoryview) -> None:
        self._value = self._crc64nvme(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:016x}"


def crc64_bytes(data: bytes) -> str:
    """CRC64NVME of ``data`` as 16 hex digits."""
    crc = Crc64()
    crc.update(data)
    return crc.hexdigest()


def crc64_file(path: Path, *, from_disk: bool = False) -> str:
    """CRC64NVME of a file as 16 hex digits.

    ``from_disk`` first asks the kernel to forget its cached pages, so that the bytes come from the device (as far
    as the file system allows). Raises ``OSError``.
    """
    crc = Crc64()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        if from_disk:
            drop_cache(stream.fileno())
        while count := stream.readinto(buffer):
            crc.update(buffer[:count])
    return crc.hexdigest()
