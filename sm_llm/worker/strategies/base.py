"""The door of a training engine: what the loop asks of fsdp, and later of smp and nxd."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Strategy(Protocol):
    """Builds a sharded model and optimiser and knows how to step, save and load them."""

    device: torch.device
    data_parallel_rank: int
    data_parallel_degree: int

    def setup(self) -> None:
        """Initialise process groups and the device mesh."""

    def build_model(self) -> torch.nn.Module:
        """The sharded model with its initial weights."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        """The optimiser over the sharded parameters, with its decay groups."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch's forward and backward; gradients are reduced only in the last."""

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Clip by, and return, the global gradient norm as a device scalar (no host synchronisation)."""

    def state_dict(self) -> dict[str, Any]:
        """Sharded model and optimiser state for torch.distributed.checkpoint; names free of wrapper words."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a loaded state back."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the unsharded model by Hugging Face name, one at a time, whole on rank 0's host memory.

        A collective: all ranks iterate in step; ranks other than 0 get empty tensors.
        """
