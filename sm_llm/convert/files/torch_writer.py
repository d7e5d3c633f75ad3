"""Writes torch's zip files and xser folders without torch, tensor by tensor: torch.load reads them.

Format: torch/csrc/jit/docs/serialization.md (a zip of stored records, ``data.pkl`` a pickle of protocol 2); xser as
torch_xla.utils.serialization writes it, with the ``.info.pt`` that neuronx-distributed reads beside it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.convert.files.appended_file import AppendedFile
from sm_llm.convert.files.views import FORMATS, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

ALIGNMENT = 64
"""Of a tensor's first byte, as torch has it: such files can be mapped."""
_ZIP64 = 0xFFFF_FFFF
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_FLAGS = 0x808
"""Names are UTF-8, and checksum and size follow the record, as in files of torch: they are known only then."""
_DOS_DATE = 33  # 1 January 1980: no clock in the bytes


@dataclass(frozen=True)
class Plain:
    """A tensor to be written: format and shape, rows one after the other."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * FORMATS[self.dtype].width

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


class _Pickle:
    """The few opcodes of pickle protocol 2 that a state dict needs."""

    def __init__(self) -> None:
        self._parts = [b"\x80\x02"]

    def add(self, *parts: bytes) -> None:
        self._parts += parts

    def finish(self) -> bytes:
        return b"".join([*self._parts, b"."])

    def text(self, value: str) -> None:
        body = value.encode("utf-8")
        self.add(b"X", struct.pack("<I", len(body)), body)

    def number(self, value: int) -> None:
        # BININT is signed and has 32 bits; larger numbers take LONG1.
        if value < 1 << 31:
            self.add(b"J", struct.pack("<i", value))
        else:
            body = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.add(b"\x8a", bytes([len(body)]), body)

    def numbers(self, values: Sequence[int]) -> None:
        self.add(b"(")
        for value in values:
            self.number(value)
        self.add(b"t")

    def named(self, module: str, name: str) -> None:
        self.add(f"c{module}\n{name}\n".encode())

    def tensor(self, key: int, tensor: Plain) -> None:
        self.named("torch._utils", "_rebuild_tensor_v2")
        self.add(b"((")
        self.text("storage")
        self.named("torch", FORMATS[tensor.dtype].storage)
        self.text(str(key))
        self.text("cpu")
        self.number(tensor.elements)
        self.add(b"tQ")
        self.number(0)
        self.numbers(tensor.shape)
        self.numbers(contiguous_strides(tensor.shape))
        self.add(b"\x89")  # requires_grad False
        self.named("collections", "OrderedDict")
        self.add(b")RtR")

    def reference(self, tid: int) -> None:
        self.named("torch_xla.utils.serialization", "TensorReference")
        self.add(b")\x81}")
        self.text("tid")
        self.number(tid)
        self.add(b"sb")

    def info(self, tensor: Plain) -> None:
        self.add(b"}(")
        self.text("dtype")
        self.named("torch", FORMATS[tensor.dtype].dtype)
        self.text("shape")
        self.named("torch", "Size")
        self.numbers(tensor.shape)
        self.add(b"\x85R")
        self.text("expert_model_parallel")
        self.add(b"\x89u")


def state_pickle(tensors: Sequence[tuple[str, Plain]]) -> bytes:
    """``data.pkl`` of a dict whose tensors are records 0, 1, … of the same file."""
    pickle = _Pickle()
    pickle.add(b"}(")
    for key, (name, tensor) in enumerate(tensors):
        pickle.text(name)
        pickle.tensor(key, tensor)
    pickle.add(b"u")
    return pickle.finish()


def tensor_pickle(tensor: Plain) -> bytes:
    """``data.pkl`` of one tensor."""
    pickle = _Pickle()
    pickle.tensor(0, tensor)
    return pickle.finish()


def reference_pickle(names: Sequence[str]) -> bytes:
    """``data.pkl`` of xser's dict: each name refers to the file ``tensor_<place>.pt``."""
    pickle = _Pickle()
    pickle.add(b"}(")
    for tid, name in enumerate(names):
        pickle.text(name)
        pickle.reference(tid)
    pickle.add(b"u")
    return pickle.finish()


def info_pickle(tensors: Sequence[Plain]) -> bytes:
    """``data.pkl`` of ``.info.pt``: number -> format, shape and whether the tensor is an expert's."""
    pickle = _Pickle()
    pickle.add(b"}(")
    for tid, tensor in enumerate(tensors):
        pickle.number(tid)
        pickle.info(tensor)
    pickle.add(b"u")
    return pickle.finish()


@dataclass(frozen=True)
class _Record:
    name: bytes
    offset: int
    size: int
    crc: int


class TorchFile:
    """One file as torch.save writes it, record by record. ``stem`` is the folder inside the zip.

    Raises ``OSError``. The caller flushes and renames the file.
    """

    def __init__(self, path: Path, stem: str, pickle: bytes) -> None:
        self._file = AppendedFile(path)
        self._stem = stem
        self._records: list[_Record] = []
        self._bytes("data.pkl", pickle)
        self._bytes("byteorder", b"little")

    def tensor(self, key: int, size: int, pieces: Iterator[memoryview], seen: Callable[[memoryview], None]) -> None:
        """Write record ``data/<key>`` of ``size`` bytes; ``seen`` gets every piece."""
        self._record(f"data/{key}", size, pieces, seen)

    def close(self) -> int:
        """Write the end of the zip; returns the size of the file."""
        self._bytes("version", b"3\n")
        self._end()
        return self._file.close()

    def abort(self) -> None:
        """Close the file as it is."""
        self._file.abort()

    def _bytes(self, name: str, body: bytes) -> None:
        self._record(name, len(body), iter([memoryview(body)]), lambda _: None)

    def _record(self, name: str, size: int, pieces: Iterator[memoryview], seen: Callable[[memoryview], None]) -> None:
        encoded = f"{self._stem}/{name}".encode()
        start, crc, count = self._file.size, 0, 0
        self._file.write(self._header(encoded, size))
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
            seen(piece)
            self._file.write(piece)
            count += len(piece)
        if count != size:
            raise AssertionError(f"{name}: {count} bytes instead of {size}")
        self._file.write(struct.pack("<4sI2Q" if size >= _ZIP64 else "<4s3I", b"PK\x07\x08", crc, size, size))
        self._records.append(_Record(encoded, start, size, crc))

    def _header(self, name: bytes, size: int) -> bytes:
        """A local header, padded so that the record begins at a multiple of 64."""
        # Sizes from 4 GiB, here and behind the record, have 8 bytes where there is an extra field of zip64.
        large = size >= _ZIP64
        extra = struct.pack("<2H2Q", 1, 16, 0, 0) if large else b""
        unpadded = self._file.size + _LOCAL.size + len(name) + len(extra) + 4
        # Padding goes into an extra field "FB", as torch's own writer has it.
        padding = -unpadded % ALIGNMENT
        extra += struct.pack("<2s", b"FB") + struct.pack("<H", padding) + b"Z" * padding
        shown = _ZIP64 if large else 0
        # 45 is the version that knows zip64.
        fields = (b"PK\x03\x04", 45 if large else 20, _FLAGS, 0, 0, _DOS_DATE, 0, shown, shown, len(name), len(extra))
        return _LOCAL.pack(*fields) + name + extra

    def _end(self) -> None:
        begin = self._file.size
        for it in self._records:
            large = [value for value in (it.size, it.size, it.offset) if value >= _ZIP64]
            extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
            size, offset = min(it.size, _ZIP64), min(it.offset, _ZIP64)
            version = 45 if large else 20
            fields = (b"PK\x01\x02", version, version, _FLAGS, 0, 0, _DOS_DATE, it.crc, size, size)
            self._file.write(_CENTRAL.pack(*fields, len(it.name), len(extra), 0, 0, 0, 0, offset) + it.name + extra)
        length, count = self._file.size - begin, len(self._records)
        # What the old end record cannot hold is in a zip64 end record and its locator, in front of it.
        if begin >= _ZIP64 or count >= 0xFFFF:
            end = self._file.size
            body = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, begin)
            self._file.write(body + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        shown = min(count, 0xFFFF)
        self._file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, shown, shown, length, min(begin, _ZIP64), 0))
