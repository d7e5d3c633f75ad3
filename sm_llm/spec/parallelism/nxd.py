"""The strategy ``nxd``: neuronx-distributed on Trainium."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel


class NxdSpec(SpecModel):
    """NxD: tensor and pipeline parallelism on NeuronCores, optimiser state sharded over data-parallel ranks.

    World size = tensor_parallel_degree x pipeline_parallel_degree x data-parallel degree.
    """

    strategy: Literal["nxd"] = "nxd"
    """The training engine."""
    tensor_parallel_degree: int = Field(default=8, ge=1, le=65_536)
    """NeuronCores that share each layer's matrices."""
    pipeline_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Stages that the layers are divided into."""
    virtual_pipeline_degree: int = Field(default=1, ge=1, le=65_536)
    """Parts of the layers that each stage holds (interleaved schedule)."""
    kv_size_multiplier: int | None = Field(default=None, ge=1, le=65_536)
    """Copies of each key/value head; null derives tensor_parallel_degree / kv heads where that is more than 1."""
    sequence_parallel: bool = True
    """Divide activations between the tensor-parallel regions along the sequence."""
    zero1: bool = True
    """Shard the optimiser state over data-parallel ranks (ZeRO-1)."""
    fuse_qkv: bool = True
    """One matrix for query, key and value; converted checkpoints must have been made with the same."""
    flash_attention: bool = True
    """NKI flash attention."""
    activation_checkpointing: Literal["none", "selective", "full"] = "selective"
    """``selective`` recomputes attention, ``full`` every decoder layer."""
    meta_device_initialization: bool = True
    """Build the model without memory first."""
    compile_cache: str | None = None
    """Folder or S3 prefix of compiled graphs; null keeps them beside the runs, shared by all of them."""

    @property
    def ranks_per_batch(self) -> int:
        """Processes that work on the same micro-batch."""
        return self.tensor_parallel_degree * self.pipeline_parallel_degree
