"""The sum of a batch's token losses in fp32; the loop divides it by the token count of the whole global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position whose prediction does not count (Hugging Face's convention)."""


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """What each position predicts, from labels [n, seq] that are not shifted; a row's last position nothing (-100)."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # shifting the logits instead would copy them


def token_loss_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum over a batch of the cross-entropy (nats) of predicting ``targets`` [n, seq]; -100 does not count.

    ``logits`` [n, seq, vocab] in any float format. Returns an fp32 scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
