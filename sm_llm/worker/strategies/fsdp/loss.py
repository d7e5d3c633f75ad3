"""Output head and cross-entropy in one: chunk after chunk of tokens, so that the whole logits never exist.

The gradients of the head's inputs and weight are computed with the loss, while a chunk's logits are there: they are
neither kept for the backward pass nor computed again. The same in fp32 as ``token_loss_sum`` of the whole logits.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sm_llm.worker.device import memory_of
from sm_llm.worker.training.token_loss import IGNORED

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOST_BYTES = 1 << 28
_DEVICE_SHARE = 32


@dataclass(frozen=True)
class Vocabulary:
    """The part of the vocabulary whose logits this process computes: all of it, or that from ``first`` on."""

    size: int
    first: int = 0
    group: dist.ProcessGroup | None = None
    """The processes that have the other parts."""


def logit_bytes(device: torch.device) -> int:
    """How much memory the logits of one chunk may take: a 32nd of a GPU's (4.4 GiB of an H200's)."""
    memory = memory_of(device)
    return _HOST_BYTES if memory is None else memory // _DEVICE_SHARE


def chunk_rows(tokens: int, weight: torch.Tensor) -> int:
    """Tokens of a chunk: as many as fit in ``logit_bytes``, in chunks of equal size."""
    most = max(1, logit_bytes(weight.device) // (weight.shape[0] * weight.element_size()))
    # Rounded up, twice: the number of chunks, then their size.
    chunks = -(-tokens // most)
    return -(-tokens // max(1, chunks))


class LossHead:
    """Lets a model's output head return the sum of token losses in place of logits, when it is given ``targets``.

    It happens inside of the head's own forward, where FSDP has gathered its weight. Where tensor parallelism has
    split the vocabulary (``tensor.SplitVocabulary``), the loss is computed over the parts, and logits are split
    along it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._head: torch.nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
        assert self._head.bias is None
        self._targets: torch.Tensor | None = None
        self._head.forward = self._forward

    @contextmanager
    def predicting(self, targets: torch.Tensor) -> Iterator[None]:
        """Inside, the model's ``logits`` are the loss (fp32 scalar) of these targets, [n, seq]."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._head.weight
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        if self._targets is not None:
            tokens, targets = hidden.flatten(0, -2), self._targets.flatten()
            # In evaluation as well: whole logits would take the memory that training has just saved.
            return linear_loss(tokens, local, targets, _part_of(weight), chunk_rows(tokens.shape[0], local))
        logits = F.linear(hidden, local)
        if not isinstance(weight, DTensor):
            return logits
        shape = torch.Size([*logits.shape[:-1], weight.shape[0]])
        # Of the whole logits, which no process has.
        stride = torch.empty(shape, device="meta").stride()
        layout = [Shard(logits.dim() - 1)]
        return DTensor.from_local(logits, weight.device_mesh, layout, run_check=False, shape=shape, stride=stride)


def _part_of(weight: torch.Tensor) -> Vocabulary:
    if not isinstance(weight, DTensor):
        return Vocabulary(weight.shape[0])
    _, offsets = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return Vocabulary(weight.shape[0], offsets[0], weight.device_mesh.get_group())


def linear_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, part: Vocabulary, rows: int
) -> torch.Tensor:
    """Sum of cross-entropies (nats, fp32 scalar) of predicting ``targets`` [n] from ``hidden`` [n, h]; -100 is none.

    ``weight`` [part of the vocabulary, h]; at most ``rows`` tokens are computed at a time. A target outside of the
    vocabulary makes it NaN. The gradient of ``hidden`` is this part's share of it: the caller adds them up.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        found = _LinearLoss.apply(hidden, weight, targets, part, rows)  # type: ignore[no-untyped-call]
        return cast("torch.Tensor", found)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for chunk in _chunks(hidden.shape[0], rows):
        total += _losses(F.linear(hidden[chunk], weight), targets[chunk], part, gradients=False).sum()
    return total


def _chunks(tokens: int, rows: int) -> list[slice]:
    return [slice(begin, min(begin + rows, tokens)) for begin in range(0, tokens, rows)]


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, part: Vocabulary, rows: int
    ) -> torch.Tensor:
        chunks = _chunks(hidden.shape[0], rows)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Every row of it is written by exactly one chunk.
        of_hidden, of_weight = torch.empty_like(hidden), None
        for chunk in chunks:
            logits = torch.mm(hidden[chunk], weight.t())
            total += _losses(logits, targets[chunk], part, gradients=True).sum()
            # The logits are their own gradients by now.
            torch.mm(logits, weight, out=of_hidden[chunk])
            if len(chunks) == 1:
                of_weight = torch.mm(logits.t(), hidden)
            else:
                of_weight = _add_product(of_weight, logits.t(), hidden[chunk])
            del logits  # before the next chunk's: else the memory of two is taken
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.format = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        # In place: this function owns both, and a step's backward pass comes once.
        for it in (of_hidden, of_weight):
            _scale(it, gradient)
        return of_hidden, of_weight.to(ctx.format), None, None, None


def _scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place by a scalar of another format, which is not rounded to that of ``values``."""
    if values.is_cuda:
        from sm_llm.worker.strategies.fsdp.kernels import scale

        scale(values, factor)
    else:
        values.mul_(factor)


def _add_product(total: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``total`` plus a matrix product, in fp32: what many chunks add would be rounded away in bf16."""
    if total is None:
        total = torch.zeros((first.shape[0], second.shape[1]), dtype=torch.float32, device=first.device)
    if first.dtype == torch.float32:
        return total.addmm_(first, second)
    if first.is_cuda:
        return torch.addmm(total, first, second, out_dtype=torch.float32, out=total)
    return total.add_(torch.mm(first, second))


def _losses(logits: torch.Tensor, targets: torch.Tensor, part: Vocabulary, *, gradients: bool) -> torch.Tensor:
    """Each row's loss, fp32 [rows]; with ``gradients``, ``logits`` [rows, columns] turn into those of the losses."""
    local = targets - part.first
    own = torch.where((local >= 0) & (local < logits.shape[1]), local, -1)
    counted = targets != IGNORED
    counts = counted.to(torch.float32)
    # With a part of the vocabulary alone the sum of the row is not known before the exchange.
    at_once = gradients and logits.is_cuda and part.group is None
    if logits.is_cuda:
        from sm_llm.worker.strategies.fsdp.kernels import row_statistics, turn_into_gradients

        top, total, chosen = row_statistics(logits, own, counts if at_once else None)
    else:
        top, total, chosen = _row_statistics(logits, own)
    if part.group is not None:
        top, total, chosen = _joined(top, total, chosen, part.group)
    spread = top + total.log()
    if gradients and not at_once:
        (turn_into_gradients if logits.is_cuda else _turn_into_gradients)(logits, own, counts, spread)
    losses = torch.where(counted, spread - chosen, 0.0)
    # NaN makes the step not finite, which is reported; an exception would need to wait for the device.
    known = (targets >= 0) & (targets < part.size)
    return torch.where(known | ~counted, losses, float("nan"))


def _joined(
    top: torch.Tensor, total: torch.Tensor, chosen: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows' statistics over all parts of the vocabulary. A collective."""
    whole = top.clone()
    # The maximum first, because each part's sum is relative to its own.
    dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([total * (top - whole).exp(), chosen])
    dist.all_reduce(sums, group=group)
    return whole, sums[0], sums[1]


def _row_statistics(logits: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``kernels.row_statistics`` for the CPU."""
    values = logits.float()
    top = values.amax(1)
    chosen = values.gather(1, own.clamp(min=0).unsqueeze(1)).squeeze(1)
    return top, (values - top.unsqueeze(1)).exp_().sum(1), torch.where(own >= 0, chosen, 0.0)


def _turn_into_gradients(logits: torch.Tensor, own: torch.Tensor, counts: torch.Tensor, spread: torch.Tensor) -> None:
    """``kernels.turn_into_gradients`` for the CPU."""
    slopes = (logits.float() - spread.unsqueeze(1)).exp_()
    slopes.scatter_add_(1, own.clamp(min=0).unsqueeze(1), -(own >= 0).to(torch.float32).unsqueeze(1))
    torch.mul(slopes, counts.unsqueeze(1), out=logits)
