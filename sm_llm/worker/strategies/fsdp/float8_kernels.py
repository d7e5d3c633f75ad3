"""Triton kernels of products in fp8: what they take in both layouts, and the largest values of a gated block.

Imported where a GPU computes. torch.compile sees them as operators without side effects.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

_PROGRAMS = 132 * 16
"""Of a reduction: as many as fit on the multiprocessors of a Hopper GPU at once."""
_BLOCK, _WARPS = 1_024, 4
_TILE_ROWS, _TILE_COLUMNS, _TILE_WARPS = 32, 128, 4
_TURNED, _TURNED_WARPS = 64, 4


@triton.jit
def _sigmoid(values):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + tl.exp(-values))


@triton.jit  # type: ignore[untyped-decorator]
def _largest_kernel(gate, up, found, count, turns, programs: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.zeros([block], tl.float32)
    # 64 bits: a long sequence in a wide layer has more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    # Neighbouring programs read neighbouring blocks, whatever the size; torch.compile's parts of a tensor are unaligned
    # unless it is divisible by their number.
    for _ in range(turns):
        inside = at < count
        gated = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        hidden = gated * _sigmoid(gated) * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(hidden))
        at += programs * block
    tl.store(found + tl.program_id(0), tl.max(largest))


def _turns(values: torch.Tensor) -> int:
    """How many blocks each program of a reduction reads. (In the kernel, sums of 32 bits would overflow below 2^31.)"""
    return triton.cdiv(values.numel(), _PROGRAMS * _BLOCK)  # type: ignore[no-any-return]


@triton_op("sm_llm::gated_largest", mutates_args=())
def gated_largest(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of ``silu(gate) * up``, an fp32 scalar. Both contiguous, of one size."""
    # The largest of each program: no memory to clear before, as an atomic maximum would need.
    found = torch.empty(_PROGRAMS, dtype=torch.float32, device=gate.device)
    wrap_triton(_largest_kernel)[(_PROGRAMS,)](
        gate, up, found, gate.numel(), _turns(gate), _PROGRAMS, _BLOCK, num_warps=_WARPS
    )
    return found.amax()


@triton.jit
def _slopes(gated, upper, slope):  # type: ignore[no-untyped-def]
    """Gradients of ``silu(gate)`` and ``up`` from that of their product; and the product."""
    share = _sigmoid(gated)
    active = gated * share
    return slope * upper * (share + active * (1.0 - share)), slope * active, active * upper


@triton.jit  # type: ignore[untyped-decorator]
def _largest_slopes_kernel(  # type: ignore[no-untyped-def]
    gate, up, slope, found, count, turns, programs: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    largest_gate = tl.zeros([block], tl.float32)
    largest_up = tl.zeros([block], tl.float32)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    for _ in range(turns):
        inside = at < count
        gated = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        of_gate, of_up, _ = _slopes(gated, upper, tl.load(slope + at, mask=inside, other=0.0).to(tl.float32))
        largest_gate = tl.maximum(largest_gate, tl.abs(of_gate))
        largest_up = tl.maximum(largest_up, tl.abs(of_up))
        at += programs * block
    tl.store(found + tl.program_id(0), tl.max(largest_gate))
    tl.store(found + programs + tl.program_id(0), tl.max(largest_up))


@triton_op("sm_llm::gated_largest_slopes", mutates_args=())
def gated_largest_slopes(gate: torch.Tensor, up: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """The largest magnitudes of the gradients of ``gate`` and ``up``, fp32 [2]; ``slope`` is that of their product."""
    found = torch.empty(2, _PROGRAMS, dtype=torch.float32, device=gate.device)
    wrap_triton(_largest_slopes_kernel)[(_PROGRAMS,)](
        gate, up, slope, found, gate.numel(), _turns(gate), _PROGRAMS, _BLOCK, num_warps=_WARPS
    )
    return found.amax(1)


@triton.jit
def _saturated(values, scale, limit, target):  # type: ignore[no-untyped-def]
    # The scale is rounded, so that the largest value may lie beyond the format's; e4m3 has no infinity for it. NaN
    # passes both comparisons, and is seen as a loss that is not finite.
    scaled = values * tl.load(scale)
    scaled = tl.where(scaled > limit, limit, scaled)
    scaled = tl.where(scaled < -limit, -limit, scaled)
    return scaled.to(target.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def _round_kernel(values, scale, result, count, limit: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    given = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + at, _saturated(given, scale, limit, result), mask=inside)


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Contiguous ``values`` times ``scale``, an fp32 scalar on their device, in e4m3, in one pass over memory."""
    result = torch.empty_like(values, dtype=torch.float8_e4m3fn)
    if count := values.numel():
        limit = torch.finfo(result.dtype).max
        _round_kernel[(triton.cdiv(count, _BLOCK),)](values, scale, result, count, limit, _BLOCK, num_warps=_WARPS)
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _slopes_kernel(  # type: ignore[no-untyped-def]
    gate, up, slope, hidden_scale, gate_scale, up_scale,
    hidden_columns, gate_rows, gate_columns, up_rows, up_columns, rows, columns,
    hidden_limit: tl.constexpr, slope_limit: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    at, inside = row[:, None] * columns + column[None, :], (row[:, None] < rows) & (column[None, :] < columns)
    gated = tl.load(gate + at, mask=inside, other=0.0)
    upper = tl.load(up + at, mask=inside, other=0.0)
    above = tl.load(slope + at, mask=inside, other=0.0)
    of_gate, of_up, _ = _slopes(gated.to(tl.float32), upper.to(tl.float32), above.to(tl.float32))
    tl.store(gate_rows + at, _saturated(of_gate, gate_scale, slope_limit, gate_rows), mask=inside)
    tl.store(up_rows + at, _saturated(of_up, up_scale, slope_limit, up_rows), mask=inside)
    # Computed again from transposed inputs. Triton 3.6 stores wrong bytes where it transposes what is rounded to e5m2
    # (its issue 11111 has a case), and this is faster as well.
    gated, upper, above = tl.trans(gated), tl.trans(upper), tl.trans(above)
    at, inside = column[:, None] * rows + row[None, :], (column[:, None] < columns) & (row[None, :] < rows)
    of_gate, of_up, hidden = _slopes(gated.to(tl.float32), upper.to(tl.float32), above.to(tl.float32))
    tl.store(gate_columns + at, _saturated(of_gate, gate_scale, slope_limit, gate_columns), mask=inside)
    tl.store(up_columns + at, _saturated(of_up, up_scale, slope_limit, up_columns), mask=inside)
    tl.store(hidden_columns + at, _saturated(hidden, hidden_scale, hidden_limit, hidden_columns), mask=inside)


@triton_op("sm_llm::gated_slopes", mutates_args=())
def gated_slopes(
    gate: torch.Tensor,
    up: torch.Tensor,
    slope: torch.Tensor,
    hidden_scale: torch.Tensor,
    gate_scale: torch.Tensor,
    up_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the products of the backward pass take, in fp8, from contiguous [rows, columns].

    ``silu(gate) * up`` [columns, rows] in e4m3; the gradient of ``gate`` [rows, columns] and [columns, rows], and that
    of ``up``, in e5m2. Each is multiplied by its scale, an fp32 scalar.
    """
    rows, columns = gate.shape
    hidden_columns = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=gate.device)
    gate_rows, up_rows = (torch.empty_like(gate, dtype=torch.float8_e5m2) for _ in range(2))
    gate_columns, up_columns = (torch.empty_like(hidden_columns, dtype=torch.float8_e5m2) for _ in range(2))
    grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(columns, _TILE_COLUMNS))
    wrap_triton(_slopes_kernel)[grid](
        gate, up, slope, hidden_scale, gate_scale, up_scale,
        hidden_columns, gate_rows, gate_columns, up_rows, up_columns, rows, columns,
        torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float8_e5m2).max, _TILE_ROWS, _TILE_COLUMNS,
        num_warps=_TILE_WARPS,
    )  # fmt: skip
    return hidden_columns, gate_rows, gate_columns, up_rows, up_columns


@triton.jit  # type: ignore[untyped-decorator]
def _round_both_kernel(  # type: ignore[no-untyped-def]
    values, scale, by_rows, by_columns, rows, columns,
    limit: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.program_id(1).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)
    at, inside = row[:, None] * columns + column[None, :], (row[:, None] < rows) & (column[None, :] < columns)
    found = tl.load(values + at, mask=inside, other=0.0)
    tl.store(by_rows + at, _saturated(found.to(tl.float32), scale, limit, by_rows), mask=inside)
    # Rounded after it is transposed, as in the kernel above.
    found = tl.trans(found)
    at, inside = column[:, None] * rows + row[None, :], (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(by_columns + at, _saturated(found.to(tl.float32), scale, limit, by_columns), mask=inside)


@triton_op("sm_llm::rounded_both", mutates_args=())
def rounded_both(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous ``values`` [rows, columns] times ``scale``, an fp32 scalar, in e5m2, and the same [columns, rows]."""
    rows, columns = values.shape
    by_rows = torch.empty_like(values, dtype=torch.float8_e5m2)
    by_columns = torch.empty(columns, rows, dtype=by_rows.dtype, device=values.device)
    grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(columns, _TILE_COLUMNS))
    wrap_triton(_round_both_kernel)[grid](
        values, scale, by_rows, by_columns, rows, columns,
        torch.finfo(by_rows.dtype).max, _TILE_ROWS, _TILE_COLUMNS, num_warps=_TILE_WARPS,
    )  # fmt: skip
    return by_rows, by_columns


@triton.jit  # type: ignore[untyped-decorator]
def _turn_kernel(values, result, rows, columns, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    found = tl.load(values + row[:, None] * columns + column[None, :], mask=inside, other=0)
    inside = (column[:, None] < columns) & (row[None, :] < rows)
    tl.store(result + column[:, None] * rows + row[None, :], tl.trans(found), mask=inside)


@triton_op("sm_llm::turned", mutates_args=())
def turned(values: torch.Tensor) -> torch.Tensor:
    """Contiguous ``values`` [rows, columns] of one byte each, by columns: contiguous [columns, rows]."""
    rows, columns = values.shape
    result = torch.empty(columns, rows, dtype=torch.uint8, device=values.device)
    grid = (triton.cdiv(rows, _TURNED), triton.cdiv(columns, _TURNED))
    wrap_triton(_turn_kernel)[grid](values.view(torch.uint8), result, rows, columns, _TURNED, num_warps=_TURNED_WARPS)
    return result.view(values.dtype)
