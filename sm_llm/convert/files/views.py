"""Tensors in files as memory-mapped arrays, and their bytes in chunks: nothing here holds a whole tensor."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Raw = npt.NDArray[Any]
"""Elements as unsigned integers of their width: copying never changes a bit."""

CHUNK_BYTES = 1 << 18
"""Bytes handled at a time: large enough for full speed, small enough to stay in the processor's cache."""


@dataclass(frozen=True)
class NumberFormat:
    """A number format by its names: of torch's storage class and of torch's data type."""

    width: int
    storage: str
    dtype: str


FORMATS = {
    "F64": NumberFormat(8, "DoubleStorage", "float64"),
    "F32": NumberFormat(4, "FloatStorage", "float32"),
    "F16": NumberFormat(2, "HalfStorage", "float16"),
    "BF16": NumberFormat(2, "BFloat16Storage", "bfloat16"),
}
"""By the names that safetensors uses. Other formats are not weights that are trained on."""
_UNSIGNED = {8: np.uint64, 4: np.uint32, 2: np.uint16}


class Streamed(Protocol):
    """A file whose bytes are elsewhere."""

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes ``[begin, end)``, a piece at a time."""

    def keep(self, begin: int, end: int) -> None:
        """Bring bytes ``[begin, end)`` to the file here."""


@dataclass(frozen=True)
class View:
    """A tensor in a file: format, shape, strides in elements, and the byte where it begins.

    ``streamed``: the file here is a hole, and its bytes come from there.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    streamed: Streamed | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes of the tensor's elements."""
        return math.prod(self.shape) * FORMATS[self.dtype].width

    def array(self) -> Raw:
        """The mapped elements, in memory where they are streamed. Raises ``OSError``; the caller checked the file."""
        if self.streamed is None:
            return self._mapped()
        # A tensor in a safetensors file is contiguous.
        body = bytearray(self.size)
        position = 0
        for piece in self.streamed.pieces(self.offset, self.offset + self.size):
            body[position : position + len(piece)] = piece
            position += len(piece)
        return np.frombuffer(body, _UNSIGNED[FORMATS[self.dtype].width]).reshape(self.shape)

    def _mapped(self) -> Raw:
        width = FORMATS[self.dtype].width
        extent = 1 + sum((length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True))
        # Not ``np.memmap``: it resolves the file's path each time, and many slices are taken of many files.
        begin = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb", buffering=0) as file:
            end = self.offset + extent * width
            mapped = mmap.mmap(file.fileno(), end - begin, access=mmap.ACCESS_READ, offset=begin)
        elements = np.frombuffer(mapped, _UNSIGNED[width], extent, self.offset - begin)
        return np.lib.stride_tricks.as_strided(
            elements, self.shape, [it * width for it in self.strides], writeable=False
        )

    @cached_property
    def kept(self) -> Raw:
        """The elements, mapped once: for views of which many slices are taken, in no more files than the model has."""
        return self._mapped()

    def bring(self) -> None:
        """Have the bytes here that ``kept`` maps."""
        if self.streamed is not None:
            self.streamed.keep(self.offset, self.offset + self.size)


@dataclass(frozen=True)
class Slice:
    """Rows (``axis`` 0) or columns (1) ``[begin, end)`` of a view; ``keep`` maps it once for all of its slices."""

    view: View
    axis: int
    begin: int
    end: int
    keep: bool = False

    @property
    def is_run(self) -> bool:
        """Whether its bytes follow each other in the file."""
        return self.axis == 0 and self.view.strides == contiguous_strides(self.view.shape)

    def array(self) -> Raw:
        """The mapped elements."""
        if self.keep:
            self.view.bring()
        array = self.view.kept if self.keep else self.view.array()
        return array[self.begin : self.end] if self.axis == 0 else array[:, self.begin : self.end]

    def run(self) -> Iterator[memoryview]:
        """The bytes of a run, read from the file: cheaper than mapping them where each is used once."""
        row = math.prod(self.view.shape[1:]) * FORMATS[self.view.dtype].width
        position, left = self.view.offset + self.begin * row, (self.end - self.begin) * row
        if self.view.streamed is not None:
            yield from self.view.streamed.pieces(position, position + left)
            return
        buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
        with self.view.file.open("rb", buffering=0) as file:
            while left:
                # It may return fewer bytes than were asked for, and none only at the end of the file.
                count = os.preadv(file.fileno(), [buffer[:left]], position)
                if not count:
                    raise OSError(f"{self.view.file} was cut off while it was read")
                yield buffer[:count]
                position, left = position + count, left - count


def whole(view: View) -> Slice:
    """All rows of a view."""
    return Slice(view, 0, 0, view.shape[0])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of rows that follow each other."""
    return tuple(math.prod(shape[position + 1 :]) for position in range(len(shape)))


def zeros(shape: Sequence[int], dtype: str) -> Raw:
    """Zeros that take no memory."""
    return np.broadcast_to(np.zeros((), _UNSIGNED[FORMATS[dtype].width]), tuple(shape))


def chunks(parts: Sequence[Slice | Raw], axis: int) -> Iterator[memoryview]:
    """The bytes of ``parts`` joined along ``axis``, in pieces of about ``CHUNK_BYTES``.

    A piece is valid until the next one is asked for.
    """
    if axis == 0:
        for part in parts:
            yield from part.run() if isinstance(part, Slice) and part.is_run else _rows([_array(part)])
    else:
        yield from _rows([_array(part) for part in parts])


def _array(part: Slice | Raw) -> Raw:
    return part.array() if isinstance(part, Slice) else part


def _rows(parts: Sequence[Raw]) -> Iterator[memoryview]:
    """Rows of arrays that stand beside each other."""
    first = parts[0]
    if not all(part.size for part in parts):
        return
    # A vector is a matrix of one column.
    columns = [part.reshape(len(part), -1) if part.ndim == 1 else part for part in parts]
    width = sum(part.shape[1] for part in columns)
    block = max(1, CHUNK_BYTES // (width * first.itemsize))
    buffer = np.empty((min(block, len(first)), width), first.dtype)
    for begin in range(0, len(first), block):
        rows = min(block, len(first) - begin)
        position = 0
        for part in columns:
            buffer[:rows, position : position + part.shape[1]] = part[begin : begin + rows]
            position += part.shape[1]
        yield _bytes(buffer[:rows])


def _bytes(array: Raw) -> memoryview:
    """The bytes of a contiguous array, without copying."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def same(first: Raw, other: Raw) -> bool:
    """Whether two arrays of one shape have the same bits, compared piece by piece."""
    if first.flags.c_contiguous and other.flags.c_contiguous and first.nbytes % 8 == 0:
        # Eight bytes at a time: a quarter of the time that bf16 elements take.
        first, other = (it.reshape(-1).view(np.uint64) for it in (first, other))
    block = max(1, CHUNK_BYTES // max(1, first.itemsize * math.prod(first.shape[1:])))
    steps = range(0, len(first), block)
    return all(np.array_equal(first[it : it + block], other[it : it + block]) for it in steps)


def to_float(raw: Raw, dtype: str) -> npt.NDArray[np.float64]:
    """Numbers from raw elements."""
    if dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (
        np.ascontiguousarray(raw)
        .view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype])
        .astype(np.float64)
    )
