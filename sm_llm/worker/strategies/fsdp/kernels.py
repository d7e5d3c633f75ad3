"""Triton kernels of the training step: rows of logits into losses and gradients, and AdamW in one pass over memory.

Imported where a GPU computes; torch's CUDA builds bring Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOSS_BLOCK, _LOSS_WARPS = 16_384, 16
_ADAMW_BLOCK, _ADAMW_WARPS = 4_096, 8


@triton.jit  # type: ignore[untyped-decorator]
def _loss_kernel(  # type: ignore[no-untyped-def]
    logits, stride, columns, own, counts, top, total, chosen, spread,
    statistics: tl.constexpr, gradients: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One row: its maximum, sum of exponentials and target's logit, and (or) its gradient in the logits' place."""
    # The offset of a row can exceed 32 bits: 32,768 rows of a vocabulary of 128,000 do.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(own + row)
    if statistics:
        highest = float("-inf")
        scaled = 0.0
        for begin in range(0, columns, block):
            at = begin + tl.arange(0, block)
            values = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            # Maximum and sum in one pass: the sum so far is scaled to the new maximum (online softmax).
            higher = tl.maximum(highest, tl.max(values))
            scaled = scaled * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher))
            highest = higher
        # -1 would be an address before the row; what is read in its place is not stored.
        held = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
        tl.store(top + row, highest)
        tl.store(total + row, scaled)
        tl.store(chosen + row, tl.where(target >= 0, held, 0.0))
        log_sum = highest + tl.log(scaled)
    else:
        log_sum = tl.load(spread + row)
    if gradients:
        weight = tl.load(counts + row)
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for begin in range(0, columns, block):
            at = begin + tl.arange(0, block)
            values = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            # The gradient of cross-entropy: the softmax, less 1 at the target.
            slope = tl.exp(values - log_sum)
            slope = tl.where(at == target, slope - 1.0, slope) * weight
            tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < columns)


def row_statistics(
    logits: torch.Tensor, own: torch.Tensor, counts: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum, sum of exponentials of the rest to it, and target's logit of each row, fp32 [rows].

    ``logits`` [rows, columns]; ``own`` int64 [rows] is the target's column, -1 where it is none of these. With
    ``counts``, fp32 [rows], the logits turn into the gradient of the loss, weighted by it, in the same pass.
    """
    rows = logits.shape[0]
    top, total, chosen = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    # Triton needs a pointer for each argument; these are not read.
    unused = top
    _launch(logits, own, unused if counts is None else counts, (top, total, chosen), unused, counts is not None)
    return top, total, chosen


def turn_into_gradients(logits: torch.Tensor, own: torch.Tensor, counts: torch.Tensor, spread: torch.Tensor) -> None:
    """Overwrite ``logits`` with the gradient of their losses, from each row's ``spread`` (log of the whole sum)."""
    _launch(logits, own, counts, None, spread, True)


def _launch(
    logits: torch.Tensor,
    own: torch.Tensor,
    counts: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    spread: torch.Tensor,
    gradients: bool,
) -> None:
    rows, columns = logits.shape
    top, total, chosen = results or (spread, spread, spread)
    _loss_kernel[(rows,)](
        logits, logits.stride(0), columns, own, counts, top, total, chosen, spread,
        results is not None, gradients, _LOSS_BLOCK, num_warps=_LOSS_WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _scale_kernel(values, factor, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    scaled = tl.load(values + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(values + at, scaled.to(values.dtype.element_ty), mask=at < count)


def scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply contiguous ``values`` in place by ``factor``, an fp32 scalar on their device that is not rounded."""
    count = values.numel()
    _scale_kernel[(triton.cdiv(count, _ADAMW_BLOCK),)](values, factor, count, _ADAMW_BLOCK, num_warps=_ADAMW_WARPS)


@triton.jit  # type: ignore[untyped-decorator]
def _add_kernel(  # type: ignore[no-untyped-def]
    own, received, result, count, factor, rank: tl.constexpr, parts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    total = tl.zeros([block], tl.float32)
    for part in tl.static_range(parts):
        if part == rank:
            total += tl.load(own + at, mask=inside, other=0.0).to(tl.float32)
        else:
            total += tl.load(received + at, mask=inside, other=0.0).to(tl.float32)
            received += count
    tl.store(result + at, (total * factor).to(result.dtype.element_ty), mask=inside)


def add_parts(own: torch.Tensor, received: torch.Tensor, rank: int, factor: float, result: torch.Tensor) -> None:
    """In one pass over memory, ``factor`` times the sum of ``own`` [n] and ``received`` [others, n] into ``result``.

    Added up in fp32 by rank, ``own`` being that of ``rank``; all contiguous, of any float formats.
    """
    count = own.numel()
    _add_kernel[(triton.cdiv(count, _ADAMW_BLOCK),)](
        own, received, result, count, factor, rank, len(received) + 1, _ADAMW_BLOCK, num_warps=_ADAMW_WARPS
    )


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]
    parameter, copy, gradient, first, second, scalars, count, beta1, rest1, beta2, rest2, eps, decay,
    has_copy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    skip = tl.load(scalars + 4)
    # Decided on the device: the host does not know yet whether the step is finite.
    if skip == 0.0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        inside = at < count
        clip = tl.load(scalars)
        rate = tl.load(scalars + 1)
        slope = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * clip
        mean = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(parameter + at, mask=inside, other=0.0).to(tl.float32)
        mean = beta1 * mean + rest1 * slope
        square = beta2 * square + rest2 * slope * slope
        root = tl.sqrt(square) * tl.load(scalars + 3) + eps
        value = value * (1.0 - rate * decay) - tl.load(scalars + 2) * mean / root
        tl.store(parameter + at, value.to(parameter.dtype.element_ty), mask=inside)
        tl.store(first + at, mean.to(first.dtype.element_ty), mask=inside)
        tl.store(second + at, square.to(second.dtype.element_ty), mask=inside)
        if has_copy:
            tl.store(copy + at, value.to(copy.dtype.element_ty), mask=inside)


def adamw(
    parameter: torch.Tensor,
    copy: torch.Tensor | None,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    scalars: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """One tensor's update in place, and its rounding into ``copy``; all contiguous, of any float formats.

    ``scalars`` fp32 on the device: factor of the gradient, rate, rate over the first bias correction, one over the
    root of the second, and 1 to change nothing.
    """
    count = parameter.numel()
    if count == 0:
        return
    _adamw_kernel[(triton.cdiv(count, _ADAMW_BLOCK),)](
        parameter, parameter if copy is None else copy, gradient, *moments, scalars, count,
        # The differences in Python's fp64: computed by the kernel from fp32 they would lose digits.
        betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps, decay, copy is not None, _ADAMW_BLOCK,
        num_warps=_ADAMW_WARPS,
    )  # fmt: skip
