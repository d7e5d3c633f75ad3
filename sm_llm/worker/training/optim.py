"""AdamW over named parameters, with the decay groups of the model's family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.models.families.family import Tensor
    from sm_llm.spec.training import OptimSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(
    parameters: Mapping[str, torch.nn.Parameter],
    tensors: Mapping[str, Tensor],
    spec: OptimSpec,
    moments: torch.dtype | None = None,
) -> torch.optim.AdamW:
    """Fused AdamW whose state exists from the start, so that a checkpoint can be loaded before the first step.

    ``parameters`` by Hugging Face name, ``tensors`` the family's view of the same names. Matrices are decayed, norms
    and biases never, embeddings (and an untied output head) by choice. The rate is set before every step. ``moments``
    is their format, None that of the parameters.
    """
    decayed = [p for name, p in parameters.items() if is_decayed(tensors[name], spec)]
    others = [p for name, p in parameters.items() if not is_decayed(tensors[name], spec)]
    groups = [
        {"params": decayed, "weight_decay": spec.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        # A process may hold no parameter of a group, and AdamW refuses an empty list.
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.eps,
        fused=True,
    )
    for parameter in parameters.values():
        # What AdamW makes in its first step; fused kernels want the count on the parameter's device.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state = {name: torch.zeros_like(parameter, dtype=moments) for name in MOMENTS}
        optimizer.state[parameter] = {"step": step, **state}
    return optimizer


def is_decayed(tensor: Tensor, spec: OptimSpec) -> bool:
    """Whether weight decay pulls at this parameter."""
    return tensor.group == "matrix" or (tensor.group == "embedding" and spec.decay_embeddings)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
