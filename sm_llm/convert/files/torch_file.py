"""Reads torch's zip files as data: a restricted unpickler that runs nothing, and tensors as places in the file."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from sm_llm.convert.files.pickle_check import MOST_BYTES, require_harmless
from sm_llm.convert.files.views import FORMATS, View
from sm_llm.errors import ConversionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_STORAGES = {it.storage: name for name, it in FORMATS.items()}
# Of tensors that are not weights, such as position ids; only their names are of interest.
_OTHER_STORAGES = {
    "LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1, "BoolStorage": 1,
}  # fmt: skip
_DTYPES = {it.dtype: name for name, it in FORMATS.items()}
_LOCAL_HEADER = 30
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Reference:
    """A tensor that xser wrote to a file of its own: ``tensor_<tid>.pt``."""

    tid: int


@dataclass(frozen=True)
class OtherTensor:
    """A tensor of a number format that is no weight's."""

    storage: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    name: str
    begin: int
    elements: int


class Frozen:
    """A function that a pickle may call and cannot change."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a function")


class _Region(io.RawIOBase):
    """Bytes ``[begin, begin + length)`` of an open file as a file of their own."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if self._position < 0:
            raise OSError("seek before the beginning")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._position)
        body = self._file.read(max(0, min(len(buffer), self._length - self._position)))
        buffer[: len(body)] = body
        self._position += len(body)
        return len(body)


def read_torch_file(path: Path, begin: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote: tensors as ``View``, ``OtherTensor`` or ``Reference``, the rest as plain values.

    ``begin`` and ``length`` are the bytes of the file that hold it, by default all.

    Raises ``ConversionError`` for a file that is damaged, compressed, of the format before torch 1.6, or that refers
    to anything but tensors; nothing in it is run.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(_region(file, path, begin, length)) as archive:
            records = _records(archive, file, begin, path.stat().st_size if length is None else begin + length)
            # The folder inside the archive may have any name: torch takes that of the file.
            name = next((it for it in records if it.count("/") == 1 and it.endswith("/data.pkl")), None)
            if name is None:
                raise ValueError("it holds no data.pkl")
            prefix = name.removesuffix("data.pkl")
            if f"{prefix}byteorder" in records and archive.read(f"{prefix}byteorder") != b"little":
                raise ValueError("its numbers are not little-endian")
            if archive.getinfo(name).file_size > MOST_BYTES:
                raise ValueError("its data.pkl is too large")
            body = archive.read(name)
            require_harmless(body)
            return _Unpickler(body, path, prefix, records).load()
    except zipfile.BadZipFile as error:
        remedy = "Copy it again; a file of torch before 1.6 must be saved again with a newer torch"
        raise ConversionError(f"{path}: is not a file of torch.save ({error}). {remedy}") from None
    except Exception as error:  # a pickle that is damaged on purpose can raise anything
        remedy = "Copy it again, or save it again as a state dict of tensors"
        raise ConversionError(f"{path}: cannot be read as tensors: {error}. {remedy}") from None


def _region(file: BinaryIO, path: Path, begin: int, length: int | None) -> Any:
    if begin == 0 and length is None:
        return file
    held = path.stat().st_size
    if length is None or begin + length > held:
        raise ValueError(f"it has {held:,} bytes, too few for a tensor at byte {begin:,}")
    return _Region(file, begin, length)


def _records(archive: zipfile.ZipFile, file: BinaryIO, origin: int, size: int) -> dict[str, tuple[int, int]]:
    """Record -> first byte in the file and size; the archive begins at byte ``origin``. Raises ``ValueError``."""
    found: dict[str, tuple[int, int]] = {}
    for info in archive.infolist():
        file.seek(origin + info.header_offset)
        header = file.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ValueError(f"the header of {info.filename} is damaged")
        # From the local header: its extra field is longer than the central directory's, because torch pads it.
        begin = origin + info.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", header[26:30]))
        # A compressed record cannot be mapped.
        if info.compress_type != zipfile.ZIP_STORED or begin + info.file_size > size:
            raise ValueError(f"{info.filename} is compressed or cut off")
        # Which of two records counts would depend on the reader.
        if info.filename in found:
            raise ValueError(f"{info.filename} is there twice")
        found[info.filename] = (begin, info.file_size)
    return found


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their formats, ordered dicts and xser's references; everything else is an error."""

    def __init__(self, body: bytes, path: Path, prefix: str, records: dict[str, tuple[int, int]]) -> None:
        super().__init__(io.BytesIO(body))
        self._path, self._prefix, self._records = path, prefix, records
        self._globals: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): Frozen(self._tensor),
            ("torch._utils", "_rebuild_parameter"): Frozen(lambda data, *_: data),
            ("torch", "Size"): Frozen(tuple),
            ("collections", "OrderedDict"): OrderedDict,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._globals:
            return self._globals[module, name]
        if module == "torch" and name in {*_STORAGES, *_OTHER_STORAGES, *_DTYPES}:
            return _DTYPES.get(name, name)
        if (module, name) == ("torch_xla.utils.serialization", "TensorReference"):
            # A class of this call alone: what a pickle does to it ends here.
            found = type("TensorReference", (), {})
            self._globals[module, name] = found
            return found
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not part of a state dict")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _, elements = pid
        if kind != "storage" or not isinstance(storage, str) or not isinstance(elements, int):
            raise pickle.UnpicklingError("it refers to something that is not a storage")
        begin, size = self._records[f"{self._prefix}data/{key}"]
        width = FORMATS[_STORAGES[storage]].width if storage in _STORAGES else _OTHER_STORAGES[storage]
        if not 0 <= elements * width <= size:
            raise pickle.UnpicklingError(f"storage {key} has {size:,} bytes, not {elements:,} elements")
        return _Storage(storage, begin, elements)

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> View | OtherTensor:
        numbers = (offset, *shape, *strides)
        if type(storage) is not _Storage or not all(type(it) is int and it >= 0 for it in numbers):
            raise pickle.UnpicklingError("a tensor is malformed")
        if len(shape) != len(strides) or len(shape) > _MOST_DIMENSIONS:
            raise pickle.UnpicklingError(f"a tensor has shape {shape} and strides {strides}")
        # The furthest element; a tensor without elements reads nothing.
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if all(shape) and last >= storage.elements:
            raise pickle.UnpicklingError(f"a tensor of shape {shape} reaches beyond its storage")
        if storage.name not in _STORAGES:
            return OtherTensor(storage.name, tuple(shape))
        dtype = _STORAGES[storage.name]
        begin = storage.begin + offset * FORMATS[dtype].width
        return View(self._path, dtype, tuple(shape), tuple(strides), begin)

    def load(self) -> Any:
        return _plain(super().load())


def _plain(value: Any) -> Any:
    """References as values of ours; a dict keeps its order."""
    if isinstance(value, dict):
        return {key: _plain(it) for key, it in value.items()}
    if type(value).__name__ == "TensorReference":
        tid = getattr(value, "tid", None)
        if type(tid) is not int or tid < 0:
            raise pickle.UnpicklingError(f"a reference names tensor {tid!r}")
        return Reference(tid)
    return value
