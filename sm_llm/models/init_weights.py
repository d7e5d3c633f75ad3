"""Initial weights as a pure function of (seed, parameter name): the same bits however a tensor is sliced."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sm_llm.models.families.family import Tensor

    # ``map``, or that of an executor.
    Run = Callable[..., Iterable[Any]]

BLOCK_ELEMENTS = 65_536
"""About this many values are drawn at a time. Part of the function: another number would draw other weights."""

# Drawn by a thread at a time: some milliseconds' work, against which handing it over takes little.
_TASK_BLOCKS = 8

Float32Array = NDArray[np.float32]


def initial_slice(
    seed: int,
    name: str,
    shape: Sequence[int],
    spec: Tensor,
    offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    run: Run = map,
) -> Float32Array:
    """The part ``[offsets, offsets + sizes)`` of parameter ``name``'s initial value, float32, shape ``sizes``.

    ``shape`` is the whole parameter's and must be ``spec.shape``. The tensor is cut into blocks of whole rows (the
    last dimension); block b comes from Philox-4x64 (Salmon et al. 2011) keyed by a hash of (seed, name) at a counter
    of its own, so a rank draws only the blocks that its shard touches, and no two parameters, blocks or shards share
    values. Any slice costs at most the rows it touches. ``run`` may draw blocks beside each other (``Executor.map``):
    numpy lets other threads work while it draws.
    """
    _check_bounds(name, shape, spec, offsets, sizes)
    if spec.init == "zeros" or 0 in sizes:
        return np.zeros(sizes, dtype=np.float32)
    if spec.init == "ones":
        return np.ones(sizes, dtype=np.float32)
    return _normal_slice(_key(seed, name), spec, offsets, sizes, run)


def _check_bounds(name: str, shape: Sequence[int], spec: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> None:
    """Our own callers' mistakes only: shapes come from the family, slices from the strategy."""
    if tuple(shape) != spec.shape or not len(shape) == len(offsets) == len(sizes):
        raise ValueError(f"{name}: shape {tuple(shape)}, offsets {tuple(offsets)}, sizes {tuple(sizes)} for {spec}")
    for length, offset, extent in zip(shape, offsets, sizes, strict=True):
        if offset < 0 or extent < 0 or offset + extent > length:
            raise ValueError(f"{name}: slice {tuple(offsets)} + {tuple(sizes)} leaves the shape {tuple(shape)}")


def _key(seed: int, name: str) -> int:
    """128 bits that no other (seed, name) has."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:16], "little")


def _normal_slice(key: int, spec: Tensor, offsets: Sequence[int], sizes: Sequence[int], run: Run) -> Float32Array:
    # The elements of a vector are rows of one column.
    lead, columns = (spec.shape[:-1], spec.shape[-1]) if len(spec.shape) > 1 else (spec.shape, 1)
    rows = _row_numbers(lead, offsets, sizes)
    first, width = (offsets[-1], sizes[-1]) if len(spec.shape) > 1 else (0, 1)
    out = np.empty((rows.size, width), dtype=np.float32)
    per_block = max(1, BLOCK_ELEMENTS // max(1, columns))
    total = math.prod(lead)

    def fill(bounds: list[tuple[int, int, int]]) -> None:
        for block, start, stop in bounds:
            origin = block * per_block
            count = min(per_block, total - origin)
            # A whole block is drawn straight into its place.
            if (stop - start, width) == (count, columns):
                _draw(key, block, spec.std, out[start:stop])
                continue
            # A block is always drawn whole: a value depends on its place in the block.
            values = np.empty((count, columns), dtype=np.float32)
            _draw(key, block, spec.std, values)
            out[start:stop] = values[_index(rows[start:stop] - origin), first : first + width]

    # The row numbers ascend, so the rows of one block follow each other.
    blocks, starts = (found.tolist() for found in np.unique(rows // per_block, return_index=True))
    bounds = list(zip(blocks, starts, [*starts[1:], rows.size], strict=True))
    tasks = [bounds[begin : begin + _TASK_BLOCKS] for begin in range(0, len(bounds), _TASK_BLOCKS)]
    # Consumes the results of an executor's map, which raises the errors of its threads here.
    deque(run(fill, tasks), maxlen=0)
    if spec.zero_row is not None:
        out[rows == spec.zero_row] = 0.0
    return out.reshape(sizes)


def _row_numbers(lead: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> NDArray[np.int64]:
    """Ascending row numbers of the slice, rows counted over all leading dimensions."""
    numbers = np.zeros(1, dtype=np.int64)
    # Of a matrix, the last offset and size are those of its columns.
    for length, offset, extent in zip(lead, offsets, sizes, strict=False):
        numbers = (numbers[:, None] * length + np.arange(offset, offset + extent)).reshape(-1)
    return numbers


def _index(rows: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Ascending row numbers as a slice where they have no gaps: a plain copy is cheaper than a gather."""
    gapless = rows[-1] - rows[0] == rows.size - 1
    return slice(int(rows[0]), int(rows[-1]) + 1) if gapless else rows


def _draw(key: int, block: int, std: float, out: Float32Array) -> None:
    """Fill ``out``, all of block ``block``, with N(0, std). The counter's top word separates the blocks."""
    generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, block]))
    generator.standard_normal(dtype=np.float32, out=out)
    out *= np.float32(std)
