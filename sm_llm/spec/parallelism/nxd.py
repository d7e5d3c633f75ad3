"""The strategy ``nxd``: neuronx-distributed on Trainium."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sm_llm.errors import Issue
from sm_llm.spec.base import Output
from sm_llm.spec.machines.neuron_releases import MAINTENANCE
from sm_llm.spec.parallelism.base import (
    Capabilities,
    Degrees,
    MemoryTerms,
    StrategySpec,
    TrainingFacts,
    divisors,
    listed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from sm_llm.spec.machines.hardware import Instance

FLASH_UNIT = 2048
"""Tokens that the NKI flash-attention kernel takes a multiple of (``kernels/flash_attn.py`` of neuronx-distributed)."""

COMPILE_CACHE = "neuron-compile-cache"
"""Folder beside the runs for compiled graphs."""


class NxdSpec(StrategySpec):
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
    result: Literal["hf", "nxd"] = "hf"
    """What a training publishes: a Hugging Face folder, or shards of these degrees, as ``convert`` writes them."""
    compile_cache: Output | None = None
    """Folder or S3 prefix of compiled graphs; null keeps them beside the runs, shared by all of them."""

    can: ClassVar = Capabilities(compiles_layers=False, compiles_ahead=True, reach_programs=True)
    image_stack: ClassVar = "neuron"
    support: ClassVar = MAINTENANCE

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel_degree, pipeline=self.pipeline_parallel_degree)

    def degree_issues(self, world_size: int, node_size: int) -> Iterator[Issue]:
        yield from super().degree_issues(world_size, node_size)
        degree = self.tensor_parallel_degree
        # Between nodes every layer would wait for the network; NeuronLink joins the cores of one node.
        if node_size % degree:
            left = f"{node_size} / {degree} leaves {node_size % degree}"
            problem = f"tensor parallelism stays within a node, whose {node_size} processes it does not divide: {left}"
            remedy = f"Use one of {listed(divisors(node_size))}"
            yield Issue(
                "nxd-tensor-degree-crosses-nodes", "task.parallelism.tensor_parallel_degree", problem, degree, remedy
            )
        if self.virtual_pipeline_degree > 1:
            problem = "the interleaved schedule of stages in parts is not supported in training"
            path = "task.parallelism.virtual_pipeline_degree"
            yield Issue("nxd-virtual-stages-unsupported", path, problem, self.virtual_pipeline_degree, "Use 1")

    def training_issues(self, training: TrainingFacts) -> Iterator[Issue]:
        yield from super().training_issues(training)
        if training.micro_batch_size != 1:
            problem = "neuronx-distributed trains with micro-batches of one sequence only"
            yield Issue(
                "nxd-micro-batch-not-one",
                "task.micro_batch_size",
                problem,
                training.micro_batch_size,
                "Use 1 and raise global_batch_size",
            )
        if training.samples and self.pipeline_parallel_degree > 1:
            problem = "stages of a pipeline give losses alone, so no text can be written"
            yield Issue("sample-unsupported", "task.logging.sample_prompt", problem, remedy="Leave it out")
        yield from self._sequence_issues(training.seq_length)
        yield from self._precision_issues(training)

    def _sequence_issues(self, length: int) -> Iterator[Issue]:
        degree, path = self.tensor_parallel_degree, "task.data.seq_length"
        # Each core of a tensor-parallel group holds an equal part of the sequence between the layers.
        if self.sequence_parallel and length % degree:
            problem = f"sequence parallelism over {degree} cores: {length} / {degree} leaves {length % degree}"
            remedy = f"Use {length // degree * degree or degree}, or task.parallelism.sequence_parallel=false"
            yield Issue("nxd-sequence-not-divisible", path, problem, length, remedy)
        if self.flash_attention and length % FLASH_UNIT:
            problem = f"the flash-attention kernel takes multiples of {FLASH_UNIT} tokens"
            remedy = f"Use {length // FLASH_UNIT * FLASH_UNIT or FLASH_UNIT}, or task.parallelism.flash_attention=false"
            yield Issue("nxd-sequence-not-for-flash-attention", path, problem, length, remedy)

    def _precision_issues(self, training: TrainingFacts) -> Iterator[Issue]:
        """With ZeRO-1 the optimiser has fp32 parameters of its own; without it, it works on the model's."""
        if self.zero1 and training.master != "fp32":
            problem = "ZeRO-1 keeps the parameters in fp32"
            yield Issue("nxd-master-not-fp32", "task.precision.master", problem, training.master, "Use fp32")
        if not self.zero1 and training.compute != "fp32":
            problem = "without it, bf16 parameters have no fp32 copy that small updates are added to"
            remedy = "Use true, or precision.compute=fp32"
            yield Issue("nxd-bf16-without-zero1", "task.parallelism.zero1", problem, False, remedy)

    def instance_issues(self, machine: Instance, where: str) -> Iterator[Issue]:
        if not machine.is_neuron:
            yield Issue(
                "nxd-needs-trainium",
                where,
                "nxd runs on Trainium only",
                machine.name,
                "Use ml.trn1.32xlarge, or strategy fsdp",
            )

    def environment(self, storage: str) -> dict[str, str]:
        """One cache of compiled graphs for all runs; Neuron keeps those of each compiler and its flags apart there.

        Graphs that failed to compile are in the cache as failed, and are tried again.
        """
        return {
            "NEURON_COMPILE_CACHE_URL": self.compile_cache or f"{storage.rstrip('/')}/{COMPILE_CACHE}",
            # The first chooses the compiler's optimisations for transformers; without the second a graph that failed
            # once is never compiled again.
            "NEURON_CC_FLAGS": "--model-type transformer --retry_failed_compilation",
        }

    def result_shards(self) -> Mapping[str, Any] | None:
        if self.result == "hf":
            return None
        return {
            "tensor_parallel_degree": self.tensor_parallel_degree,
            "pipeline_parallel_degree": self.pipeline_parallel_degree,
            "qkv": "fused" if self.fuse_qkv else "linear",
        }

    def arrangement(self, key_value_heads: int) -> str:
        tensor, pipeline = self.tensor_parallel_degree, self.pipeline_parallel_degree
        copies = max(1, tensor // key_value_heads)
        heads = f"; {key_value_heads} key/value heads x {copies} copies = {tensor}" if copies > 1 else ""
        return f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} shard files of a converted model{heads}"

    def memory(self) -> MemoryTerms:
        """Selective checkpointing computes the scores again: one layer's are there at a time."""
        kind = self.activation_checkpointing
        return MemoryTerms(
            recomputes="full" if kind == "full" else "none",
            splits_sequence=self.sequence_parallel,
            zero1=self.zero1,
            scores="none" if self.flash_attention else "all" if kind == "none" else "one",
        )
