"""Arithmetic of the strategies: which degrees fit a world size and one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue
from sm_llm.spec.parallelism.layout import divisors, listed
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.spec.parallelism.smp import SmpSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.parallelism.strategies import Parallelism
    from sm_llm.spec.tasks import TrainTask


FP8_UNIT = 16
"""TransformerEngine's kernels for fp8 want products whose sizes are multiples of this."""


def strategy_issues(parallelism: Parallelism, world_size: int, processes: int, path: str) -> Iterator[Issue]:
    """Issues of the degrees for ``world_size`` processes, ``processes`` on each node; ``path`` names the block."""
    if isinstance(parallelism, SmpSpec):
        yield from _smp_issues(parallelism, world_size, processes, path)


def training_issues(task: TrainTask, path: str = "task") -> Iterator[Issue]:
    """Issues of how a training task and its strategy fit."""
    parallelism = task.parallelism
    if isinstance(parallelism, SmpSpec):
        chunks = 2 * parallelism.context_parallel_degree
        if parallelism.context_parallel_degree > 1 and task.data.seq_length % chunks:
            problem = f"not divisible by 2 x context_parallel_degree = {chunks}"
            lower = task.data.seq_length // chunks * chunks
            yield Issue(
                "sequence-not-divisible-by-context",
                f"{path}.data.seq_length",
                problem,
                task.data.seq_length,
                f"Use {lower or chunks}",
            )
        tokens = task.micro_batch_size * task.data.seq_length // parallelism.context_parallel_degree
        if parallelism.fp8 and tokens % FP8_UNIT:
            problem = f"fp8 wants micro-batches of a multiple of {FP8_UNIT} tokens a GPU, and this makes {tokens}"
            yield Issue(
                "fp8-tokens-not-divisible",
                f"{path}.data.seq_length",
                problem,
                task.data.seq_length,
                "Use a multiple of it",
            )
        if task.precision.compile:
            problem = "the library's layers and its patches of FSDP1 do not go through torch.compile"
            yield Issue(
                "smp-compile-unsupported",
                f"{path}.precision.compile",
                problem,
                True,
                "Leave it out, or use strategy fsdp",
            )
    if isinstance(parallelism, NxdSpec) and task.micro_batch_size != 1:
        problem = "neuronx-distributed trains with micro-batches of one sequence only"
        yield Issue(
            "nxd-micro-batch-not-one",
            f"{path}.micro_batch_size",
            problem,
            task.micro_batch_size,
            "Use 1 and raise global_batch_size",
        )


def _smp_issues(smp: SmpSpec, world: int, processes: int, path: str) -> Iterator[Issue]:
    """SMP's rules (Developer Guide, "Core features of v2"; ``validate_distributed_degrees`` of AWS's adapter)."""
    shard, tensor, context = smp.hybrid_shard_degree, smp.tensor_parallel_degree, smp.context_parallel_degree
    expert = smp.expert_parallel_degree
    whole = [world % degree == 0 for degree in (tensor, context, expert)]
    largest = world // (tensor * expert)
    if whole[0] and shard > world // tensor:
        problem = f"more than world size / tensor_parallel_degree = {world} / {tensor} = {world // tensor}"
        yield Issue(
            "smp-shard-degree-too-large",
            f"{path}.hybrid_shard_degree",
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
                f"{path}.{name}",
                f"does not divide the world size of {world}",
                degree,
                f"Use one of {fitting}",
            )
    product = max(shard, 1) * tensor * expert
    if all(whole) and shard <= world // tensor and world % product:
        problem = f"hybrid_shard_degree x tensor x expert = {product} does not divide the world size of {world}"
        remedy = f"Use one of {listed(divisors(largest))}" if largest else "Use smaller degrees"
        yield Issue("smp-degrees-do-not-divide-world-size", f"{path}.hybrid_shard_degree", problem, shard, remedy)
    if tensor > processes:
        problem = f"more than the {processes} processes of a node: tensor parallelism would cross nodes"
        yield Issue(
            "smp-tensor-degree-crosses-nodes",
            f"{path}.tensor_parallel_degree",
            problem,
            tensor,
            f"Use at most {processes}",
        )
    if context > 1 and context > (shard or world // tensor):
        problem = f"more than hybrid_shard_degree = {shard or world // tensor}, from whose ranks it is taken"
        yield Issue("smp-context-degree-too-large", f"{path}.context_parallel_degree", problem, context)
    yield from _smp_option_issues(smp, path)


def _smp_option_issues(smp: SmpSpec, path: str) -> Iterator[Issue]:
    """Options that SMP cannot combine, whatever the number of processes."""
    tensor, expert = smp.tensor_parallel_degree, smp.expert_parallel_degree
    if tensor > 1 and expert > 1:
        yield Issue(
            "smp-expert-with-tensor",
            f"{path}.expert_parallel_degree",
            "not possible together with tensor parallelism",
            expert,
        )
    if smp.sm_activation_offloading and smp.activation_checkpointing == "none":
        remedy = "Set activation_checkpointing to full, or leave this off"
        yield Issue(
            "smp-offloading-without-checkpointing",
            f"{path}.sm_activation_offloading",
            "offloads checkpointed activations only",
            True,
            remedy,
        )
    if smp.collectives == "smddp" and tensor > 1 and smp.hybrid_shard_degree == 1:
        problem = "smddp does not work with tensor parallelism and hybrid_shard_degree 1"
        yield Issue("smddp-with-tensor-parallelism", f"{path}.collectives", problem, "smddp", "Use nccl")
