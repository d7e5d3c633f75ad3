"""Moves batches to the device and counts what a step's loss is averaged over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sm_llm.worker.training.loss import next_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.data.source import Batch
    from sm_llm.spec.parallelism.layout import Layout
    from sm_llm.worker.strategies.base import Strategy


def to_device(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``labels`` [n, seq] on the device; the host does not wait for the copy."""
    ids = _move(batch.input_ids, device)
    return ids, ids if batch.labels is batch.input_ids else _move(batch.labels, device)


def _move(values: object, device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def global_targets(
    batches: Sequence[Batch], *, padded: bool, layout: Layout, device: torch.device
) -> torch.Tensor | int:
    """Labels that count in the whole global batch.

    Without padding every rank has as many as this one. With padding they are summed over processes on the device, so
    the result is a device scalar that the host never reads.
    """
    if not padded:  # every position but a row's first is predicted
        return layout.data * sum(batch.labels[:, 1:].size for batch in batches)
    own = sum(batch.targets for batch in batches)
    if layout.data == 1:
        return own
    total = torch.full((), own, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total / (layout.world_size // layout.data)  # as many processes have counted the same rows


def loss_share(layout: Layout, targets: torch.Tensor | int) -> torch.Tensor | float:
    """What a token's loss weighs in the step: the parts of the loss by its ``targets``, if there are any."""
    if isinstance(targets, int):
        return layout.loss_parts / max(targets, 1)
    return layout.loss_parts / targets.clamp(min=1)


def forward_loss(strategy: Strategy, batch: Batch) -> torch.Tensor:
    """Sum of a batch's token losses (``Strategy.loss_sum``)."""
    ids, labels = to_device(batch, strategy.device)
    return strategy.loss_sum(ids, next_tokens(labels))
