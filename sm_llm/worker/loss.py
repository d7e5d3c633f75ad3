"""The sum of a batch's token losses in fp32; the loop divides it by the token count of the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position whose prediction does not count (Hugging Face's convention)."""


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over a batch of the cross-entropy (nats) of predicting each label from the positions before it.

    ``logits`` [n, seq, vocab] in any float format, ``labels`` [n, seq] not shifted: position t predicts label t + 1,
    labels of -100 do not count. Returns an fp32 scalar.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # shifts the labels: the logits would have to be copied
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
