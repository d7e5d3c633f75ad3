"""Counts what a step's loss is averaged over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.data.source import Batch
    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.device import Device


def global_targets(batches: Sequence[Batch], *, padded: bool, layout: Layout, device: Device) -> torch.Tensor | int:
    """Labels that count in the whole global batch.

    Without padding every rank has as many as this one. With padding they are summed over processes on the device, so
    the result is a scalar of ``device.counts`` that the host does not wait for.
    """
    if not padded:  # every position but a row's first is predicted
        return layout.data * sum(batch.labels[:, 1:].size for batch in batches)
    own = sum(batch.targets for batch in batches)
    if layout.data == 1:
        return own
    total = torch.full((), own, dtype=torch.float64, device=device.counts)
    dist.all_reduce(total)
    return total / (layout.world_size // layout.data)  # as many processes have counted the same rows


def loss_share(layout: Layout, targets: torch.Tensor | int) -> torch.Tensor | float:
    """What a token's loss is scaled by: the parts of the loss by the step's ``targets``, if there are any.

    The parts, because a strategy averages gradients over them, and the step wants their sum.
    """
    if isinstance(targets, int):
        return layout.loss_parts / max(targets, 1)
    return layout.loss_parts / targets.clamp(min=1)
