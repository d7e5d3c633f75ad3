"""The strategy ``smp``: SageMaker's model parallel library v2, on the images that contain it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from sm_llm.errors import Issue
from sm_llm.spec.field_classes import ORDER, PRECISION
from sm_llm.spec.parallelism.base import (
    FP8_UNIT,
    Capabilities,
    Degrees,
    Layout,
    MemoryTerms,
    StrategySpec,
    TrainingFacts,
    divisors,
    listed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.machines.hardware import Instance

_FAMILIES = ("p4d", "p4de", "p5", "p5e", "p5en")
_FP8_FAMILIES = ("p5", "p5e", "p5en")
_SMDDP_FAMILIES = ("p4d", "p4de")


class SmpSpec(StrategySpec):
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

    can: ClassVar = Capabilities(compiles_layers=False, reach_programs=True, needs_kernels=True)
    image_stack: ClassVar = "smp"
    image_marker: ClassVar = "smdistributed-modelparallel"

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel_degree, self.context_parallel_degree)

    @property
    def needs_transform(self) -> bool:
        """Whether the library's own layers replace the model's: for all degrees but sharding, and for fp8."""
        return self.degrees.together * self.expert_parallel_degree > 1 or self.fp8

    def library_parameters(self, seed: int) -> dict[str, Any]:
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

    def degree_issues(self, world_size: int, node_size: int) -> Iterator[Issue]:
        """Source: Developer Guide, "Core features of v2"; ``validate_distributed_degrees`` of AWS's adapter."""
        # The library's rules name the degree that is wrong, the general rule only the product.
        yield from list(_degree_issues(self, world_size, node_size)) or super().degree_issues(world_size, node_size)

    def arranged(self, world_size: int, node_size: int) -> Layout:
        tensor, expert = self.tensor_parallel_degree, self.expert_parallel_degree
        # Experts are held by other processes of the copies: what is sharded "over all" leaves them out.
        shard = self.hybrid_shard_degree or world_size // (tensor * expert)
        return Layout(world_size // (tensor * shard), shard, self.context_parallel_degree, tensor, expert)

    def training_issues(self, training: TrainingFacts) -> Iterator[Issue]:
        yield from super().training_issues(training)
        seq_length, path = training.seq_length, "task.data.seq_length"
        chunks = 2 * self.context_parallel_degree
        if self.context_parallel_degree > 1 and seq_length % chunks:
            problem = f"not divisible by 2 x context_parallel_degree = {chunks}"
            yield Issue(
                "sequence-not-divisible-by-context",
                path,
                problem,
                seq_length,
                f"Use {seq_length // chunks * chunks or chunks}",
            )
        tokens = training.micro_batch_size * seq_length // self.context_parallel_degree
        if self.fp8 and tokens % FP8_UNIT:
            problem = f"fp8 wants micro-batches of a multiple of {FP8_UNIT} tokens a GPU, and this makes {tokens}"
            whole = FP8_UNIT * self.context_parallel_degree
            unit = math.lcm(chunks, whole // math.gcd(whole, training.micro_batch_size))
            yield Issue("smp-fp8-tokens-not-divisible", path, problem, seq_length, f"Use a multiple of {unit}")

    def instance_issues(self, machine: Instance, where: str) -> Iterator[Issue]:
        """Source: SageMaker Developer Guide, "Supported frameworks, instances and regions" of SMP v2."""
        if machine.is_neuron:
            yield from super().instance_issues(machine, where)
            return
        if machine.family not in _FAMILIES:
            remedy = f"Use one of {', '.join(_FAMILIES)}, or strategy fsdp"
            yield Issue(
                "smp-instance-unsupported",
                where,
                "SMP v2 runs on P4d, P4de and P5 instances only",
                machine.name,
                remedy,
            )
        if self.fp8 and machine.family not in _FP8_FAMILIES:
            problem = f"the {machine.accelerator} of {machine.name} has no fp8"
            yield Issue("fp8-unsupported-by-gpu", "task.parallelism.fp8", problem, True, "Leave it out")
        if self.collectives == "smddp" and machine.family not in _SMDDP_FAMILIES:
            problem = f"SMDDP supports P4d and P4de only, not {machine.name}"
            yield Issue("smddp-instance-unsupported", "task.parallelism.collectives", problem, "smddp", "Use nccl")

    def memory(self) -> MemoryTerms:
        return MemoryTerms(recomputes=self.activation_checkpointing, offloads_activations=self.sm_activation_offloading)


def _degree_issues(smp: SmpSpec, world: int, processes: int) -> Iterator[Issue]:
    shard, tensor, context = smp.hybrid_shard_degree, smp.tensor_parallel_degree, smp.context_parallel_degree
    expert = smp.expert_parallel_degree
    whole = [world % degree == 0 for degree in (tensor, context, expert)]
    largest = world // (tensor * expert)
    if whole[0] and shard > world // tensor:
        problem = f"more than world size / tensor_parallel_degree = {world} / {tensor} = {world // tensor}"
        yield Issue(
            "smp-shard-degree-too-large",
            "task.parallelism.hybrid_shard_degree",
            problem,
            shard,
            f"Use at most {world // tensor}, or 0",
        )
    for name in ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree"):
        degree = getattr(smp, name)
        if world % degree:
            fitting = ", ".join(str(it) for it in range(1, world + 1) if world % it == 0)
            yield Issue(
                "smp-degree-does-not-divide-world-size",
                f"task.parallelism.{name}",
                f"does not divide the world size of {world}",
                degree,
                f"Use one of {fitting}",
            )
    # 0 takes whatever the other degrees leave.
    product = max(shard, 1) * tensor * expert
    # Only where no degree is wrong by itself.
    if all(whole) and shard <= world // tensor and world % product:
        problem = f"hybrid_shard_degree x tensor x expert = {product} does not divide the world size of {world}"
        remedy = f"Use one of {listed(divisors(largest))}" if largest else "Use smaller degrees"
        yield Issue(
            "smp-degrees-do-not-divide-world-size", "task.parallelism.hybrid_shard_degree", problem, shard, remedy
        )
    if tensor > processes:
        problem = f"more than the {processes} processes of a node: tensor parallelism would cross nodes"
        yield Issue(
            "smp-tensor-degree-crosses-nodes",
            "task.parallelism.tensor_parallel_degree",
            problem,
            tensor,
            f"Use at most {processes}",
        )
    if context > 1 and context > (shard or world // tensor):
        problem = f"more than hybrid_shard_degree = {shard or world // tensor}, from whose ranks it is taken"
        yield Issue("smp-context-degree-too-large", "task.parallelism.context_parallel_degree", problem, context)
    yield from _option_issues(smp)


def _option_issues(smp: SmpSpec) -> Iterator[Issue]:
    """Options that SMP cannot combine, whatever the number of processes."""
    tensor, expert = smp.tensor_parallel_degree, smp.expert_parallel_degree
    if tensor > 1 and expert > 1:
        yield Issue(
            "smp-expert-with-tensor",
            "task.parallelism.expert_parallel_degree",
            "not possible together with tensor parallelism",
            expert,
        )
    if smp.sm_activation_offloading and smp.activation_checkpointing == "none":
        remedy = "Set activation_checkpointing to full, or leave this off"
        yield Issue(
            "smp-offloading-without-checkpointing",
            "task.parallelism.sm_activation_offloading",
            "offloads checkpointed activations only",
            True,
            remedy,
        )
    if smp.collectives == "smddp" and tensor > 1 and smp.hybrid_shard_degree == 1:
        problem = "smddp does not work with tensor parallelism and hybrid_shard_degree 1"
        yield Issue("smddp-with-tensor-parallelism", "task.parallelism.collectives", problem, "smddp", "Use nccl")
