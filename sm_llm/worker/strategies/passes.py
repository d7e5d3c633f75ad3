"""The forward and backward passes of a step, one micro-batch after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sm_llm.worker.training.nonfinite_policy import poisoned
from sm_llm.worker.training.token_loss import next_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from sm_llm.data.source import Batch
    from sm_llm.worker.device import Device

    # Token ids and what each position predicts, int64 [n, seq] on the device -> fp32 scalar with its graph.
    LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run_passes(
    loss_sum: LossSum,
    accumulating: Callable[[bool], AbstractContextManager[None]],
    micro_batches: Sequence[Batch],
    scale: torch.Tensor | float,
    device: Device,
) -> torch.Tensor:
    """``Strategy.forward_backward`` of an engine that computes one micro-batch at a time.

    ``accumulating`` is the context of one of them; it gets whether that is the step's last.
    """
    # fp64, so that a loss does not hang on the number of micro-batches; on the device, so that no host reads it.
    total = torch.zeros((), dtype=torch.float64, device=device.torch_device)
    for number, batch in enumerate(micro_batches, start=1):
        with accumulating(number == len(micro_batches)):
            loss = forward_loss(loss_sum, batch, device)
            # Not ``scale * loss``: a product of its own in the graph would round the loss once more.
            torch.autograd.backward(loss, poisoned(loss, scale))
        # Without its graph, which holds the activations of the micro-batch.
        total += loss.detach()
    return total


def forward_loss(loss_sum: LossSum, batch: Batch, device: Device) -> torch.Tensor:
    """Sum of a micro-batch's token losses, on its way to the device."""
    ids = device.send(batch.input_ids)
    # Unpadded sources give one array for both, which need not travel twice.
    labels = ids if batch.labels is batch.input_ids else device.send(batch.labels)
    return loss_sum(ids, next_tokens(labels))
