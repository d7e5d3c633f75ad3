"""How the model is spread over processes; one class per strategy."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.spec.parallelism.smp import SmpSpec


class FsdpSpec(SpecModel):
    """PyTorch FSDP2, alone or multiplied with tensor and context parallelism (rules: ``spec.parallelism.layout``)."""

    strategy: Literal["fsdp"] = "fsdp"
    """The training engine."""
    sharding: Literal["full", "hybrid", "none"] = "full"
    """Shard parameters, gradients and optimiser state over all processes, over groups of them, or not at all."""
    hybrid_shard_degree: int | Literal["node"] = "node"
    """hybrid only: processes that hold one copy together. ``node`` means those of one node; copies are across nodes."""
    tensor_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Split every matrix over this many neighbouring processes; keep it within a node."""
    sequence_parallel: bool = True
    """With tensor parallelism: between the matrices, split the activations along the sequence."""
    context_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Split every sequence over this many processes, each with two chunks of it."""
    activation_checkpointing: Literal["none", "selective", "every_nth", "full"] = "none"
    """What the backward pass computes again: nothing, all but attention and every second matrix product, every n-th
    decoder layer, or every one."""
    checkpoint_every_layers: int = Field(default=2, ge=2, le=10_000)
    """every_nth only: one decoder layer in this many is computed again."""
    offload_activations: bool = False
    """Keep the inputs of the layers that are computed again in host memory until then."""
    offload_optimizer: bool = False
    """Keep sharded parameters, gradients and optimiser state in host memory, and update them there."""
    reshard_after_forward: bool | int = True
    """Free gathered parameters after the forward pass (less memory, one more all-gather); a number keeps them sharded
    over that many processes."""


def _with_strategy(block: Any) -> Any:
    """A block without ``strategy`` is fsdp's, so that single options can be set on their own."""
    return {"strategy": "fsdp", **block} if isinstance(block, dict) else block


Parallelism = Annotated[FsdpSpec | SmpSpec | NxdSpec, Field(discriminator="strategy"), BeforeValidator(_with_strategy)]
