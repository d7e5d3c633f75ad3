"""How the model is spread over processes; one class per strategy."""

from __future__ import annotations

from typing import Literal

from sm_llm.spec.base import SpecModel


class FsdpSpec(SpecModel):
    """PyTorch FSDP2: parameters, gradients and optimiser state sharded over all processes."""

    strategy: Literal["fsdp"] = "fsdp"
    """The training engine."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """``full`` recomputes every decoder layer in the backward pass."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass (less memory, one more all-gather)."""


Parallelism = FsdpSpec
