"""The strategy ``smp``: SageMaker's model parallel library v2, on the images that contain it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.comparison.classes import ORDER, PRECISION


class SmpSpec(SpecModel):
    """SMP v2 over FSDP: its nine configuration keys by their own names, and what the training script does around them.

    The job's degrees multiply: hybrid_shard_degree x tensor_parallel_degree x expert_parallel_degree divides the world
    size; context parallel ranks are taken from those of a shard.
    """

    strategy: Literal["smp"] = "smp"
    """The training engine."""
    hybrid_shard_degree: int = Field(default=0, ge=0, le=65_536)
    """GPUs that a replica of the model is sharded over; 0 takes all there are, 1 shards nothing."""
    tensor_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """GPUs that share each layer's matrices; at most those of one node."""
    context_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """GPUs that share each sequence; at most hybrid_shard_degree."""
    expert_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """GPUs that share the experts of a mixture-of-experts model; not together with tensor parallelism."""
    sm_activation_offloading: bool = False
    """Keep activations in host memory until the backward pass; needs activation_checkpointing."""
    activation_loading_horizon: int = Field(default=2, ge=1, le=10_000)
    """Layers whose offloaded activations may be on the GPU at once."""
    activation_checkpointing: Literal["none", "full"] = "full"
    """``full`` recomputes every decoder layer in the backward pass."""
    delayed_parameter_initialization: bool = True
    """Build the model without memory and fill in each shard on its own GPU; advised above about 60 billion weights."""
    fp8: Annotated[bool, PRECISION] = False
    """Matrix products in fp8 by TransformerEngine; on P5 only."""
    collectives: Literal["nccl", "smddp"] = "nccl"
    """Library of the all-gathers; smddp (SageMaker's own) on P4d and P4de only."""
    fsdp_cache_flush_warnings: bool = True
    """Warn when the allocator flushes its cache: then a higher shard degree or a smaller micro-batch is quicker."""
    allow_empty_shards: bool = False
    """Experimental: checkpoint tensors that do not divide over the shards."""
    random_seed: Annotated[int | None, ORDER] = Field(default=None, ge=0, le=2**32 - 1)
    """Seed of tensor and expert parallel ranks; null takes the task's."""

    @property
    def ranks_per_batch(self) -> int:
        """Processes that work on the same micro-batch."""
        return self.tensor_parallel_degree * self.context_parallel_degree

    @property
    def needs_transform(self) -> bool:
        """Whether the library's own layers replace the model's: for all degrees but sharding, and for fp8."""
        return self.ranks_per_batch * self.expert_parallel_degree > 1 or self.fp8

    def parameters(self, seed: int) -> dict[str, Any]:
        """The nine configuration keys, for ``mp_parameters`` and ``torch.sagemaker.init`` alike.

        ``seed`` is the task's. Source: SageMaker Developer Guide, "SMP v2 core feature configuration parameters".
        """
        return {
            "hybrid_shard_degree": self.hybrid_shard_degree,
            "sm_activation_offloading": self.sm_activation_offloading,
            "activation_loading_horizon": self.activation_loading_horizon,
            "fsdp_cache_flush_warnings": self.fsdp_cache_flush_warnings,
            "allow_empty_shards": self.allow_empty_shards,
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "context_parallel_degree": self.context_parallel_degree,
            "expert_parallel_degree": self.expert_parallel_degree,
            "random_seed": seed if self.random_seed is None else self.random_seed,
        }
