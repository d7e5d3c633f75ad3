"""How the processes of a job are arranged: the arithmetic of all parallel degrees, for plan and worker alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, SpecError

if TYPE_CHECKING:
    from sm_llm.spec.parallelism.nxd import NxdSpec
    from sm_llm.spec.parallelism.smp import SmpSpec
    from sm_llm.spec.parallelism.strategies import FsdpSpec

WHERE = "task.parallelism"


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Neighbouring ranks are of one tensor-parallel group, then of one context-parallel group.

    Seen by the parameters, ``world_size = pipeline x replicate x shard x tensor``; seen by the data it is ``pipeline x
    data x context x tensor``. In both the last varies fastest with the rank, as in Megatron-LM and NxD.
    """

    replicate: int = 1
    """Copies of the parameters."""
    shard: int = 1
    """Processes over which one copy is sharded, context-parallel ones among them."""
    context: int = 1
    """Processes that share a sequence."""
    tensor: int = 1
    """Processes that share every matrix."""
    expert: int = 1
    """Processes that share the experts of a mixture; they count among the copies, since each sees rows of its own."""
    pipeline: int = 1
    """Stages, each with a part of the layers, that a micro-batch passes through."""

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """The data-parallel degree: how many processes, or groups of them, see rows of their own."""
        return self.world_size // (self.pipeline * self.context * self.tensor)

    def data_rank(self, rank: int) -> int:
        """Which of the ``data`` parts of a batch process ``rank`` sees."""
        return rank // (self.context * self.tensor) % self.data

    @property
    def loss_parts(self) -> int:
        """Processes whose losses are different summands: tensor-parallel ones compute the same, and of a pipeline's
        stages only the last computes one."""
        return self.data * self.context

    def degrees(self) -> dict[str, int]:
        """Every degree by the name that checkpoints remember it under; that of pipelines where there is one."""
        pipeline = {"pipeline_parallel_degree": self.pipeline} if self.pipeline > 1 else {}
        return {
            "world_size": self.world_size,
            "data_parallel_degree": self.data,
            "shard_degree": self.shard,
            "context_parallel_degree": self.context,
            "tensor_parallel_degree": self.tensor,
            "expert_parallel_degree": self.expert,
            **pipeline,
        }


def layout(spec: FsdpSpec, world_size: int, node_size: int | None = None) -> Layout:
    """Arrange ``world_size`` processes, ``node_size`` (None: all) of them on each node.

    Raises ``SpecError`` with the arithmetic and the values that would work.
    """
    issues = _degree_issues(spec, world_size) or _shard_issues(spec, world_size, node_size or world_size)
    if issues:
        raise SpecError(issues)
    shard = _shard_degree(spec, world_size, node_size or world_size)
    tensor, context = spec.tensor_parallel_degree, spec.context_parallel_degree
    return Layout(world_size // (tensor * shard), shard, context, tensor)


def smp_layout(spec: SmpSpec, world_size: int) -> Layout:
    """How SMP v2 arranges ``world_size`` processes, whose degrees were checked (``spec.validation.check_strategy``)."""
    tensor, expert = spec.tensor_parallel_degree, spec.expert_parallel_degree
    shard = spec.hybrid_shard_degree or world_size // (tensor * expert)
    return Layout(world_size // (tensor * shard), shard, spec.context_parallel_degree, tensor, expert)


def nxd_layout(spec: NxdSpec, world_size: int) -> Layout:
    """How NxD arranges ``world_size`` processes, a multiple of ``spec.ranks_per_batch``.

    ZeRO-1 shards no parameters.
    """
    return Layout(
        replicate=world_size // spec.ranks_per_batch,
        tensor=spec.tensor_parallel_degree,
        pipeline=spec.pipeline_parallel_degree,
    )


def option_issues(spec: FsdpSpec) -> list[Issue]:
    """Options that do not go together, whatever the number of processes."""
    issues = []
    if spec.hybrid_shard_degree != "node" and spec.sharding != "hybrid":
        remedy = f"Set {WHERE}.sharding to hybrid, or leave it out"
        issues.append(
            Issue(
                "shard-degree-without-effect",
                f"{WHERE}.hybrid_shard_degree",
                "is for sharding: hybrid",
                spec.hybrid_shard_degree,
                remedy,
            )
        )
    if spec.offload_activations and spec.activation_checkpointing not in ("full", "every_nth"):
        problem = f"has nothing to offload with activation_checkpointing: {spec.activation_checkpointing}"
        issues.append(
            Issue(
                "offloading-without-checkpointing",
                f"{WHERE}.offload_activations",
                problem,
                True,
                "Use full or every_nth",
            )
        )
    if spec.checkpoint_every_layers != 2 and spec.activation_checkpointing != "every_nth":
        problem = f"is for activation_checkpointing: every_nth, and this is {spec.activation_checkpointing}"
        remedy = f"Set {WHERE}.activation_checkpointing to every_nth, or leave it out"
        issues.append(
            Issue(
                "checkpoint-interval-without-effect",
                f"{WHERE}.checkpoint_every_layers",
                problem,
                spec.checkpoint_every_layers,
                remedy,
            )
        )
    return issues


def sequence_issues(spec: FsdpSpec, seq_length: int) -> list[Issue]:
    """Whether a sequence can be cut: into two chunks per context-parallel process, those over tensor-parallel ones."""
    context, tensor = spec.context_parallel_degree, spec.tensor_parallel_degree if spec.sequence_parallel else 1
    unit = context * math.lcm(2, tensor) if context > 1 else tensor
    if seq_length % unit == 0:
        return []
    lower = seq_length // unit * unit
    fits = [str(length) for length in (lower, lower + unit) if length]
    needs = [f"context_parallel_degree {context} (two chunks each)"] if context > 1 else []
    needs += [f"sequence_parallel over {tensor} processes"] if tensor > 1 else []
    problem = f"not divisible by {unit}, for {' and '.join(needs)}: {seq_length} / {unit} leaves {seq_length % unit}"
    return [
        Issue(
            "sequence-not-divisible-by-degrees",
            "task.data.seq_length",
            problem,
            seq_length,
            f"{' or '.join(fits)} works",
        )
    ]


def _degree_issues(spec: FsdpSpec, world_size: int) -> list[Issue]:
    tensor, context = spec.tensor_parallel_degree, spec.context_parallel_degree
    product = tensor * context
    if world_size % product == 0:
        return []
    name = "tensor_parallel_degree" if world_size % tensor or context == 1 else "context_parallel_degree"
    problem = (
        f"{world_size} processes are not divisible by tensor_parallel_degree x context_parallel_degree = "
        f"{tensor} x {context} = {product}: {world_size} / {product} leaves {world_size % product}"
    )
    fits = [d for d in divisors(world_size) if name == "tensor_parallel_degree" or world_size % (d * tensor) == 0]
    return [
        Issue(
            "degrees-not-dividing-processes",
            f"{WHERE}.{name}",
            problem,
            getattr(spec, name),
            f"{listed(fits)} divides them",
        )
    ]


def _shard_issues(spec: FsdpSpec, world_size: int, node_size: int) -> list[Issue]:
    tensor = spec.tensor_parallel_degree
    if spec.sharding == "hybrid" and spec.hybrid_shard_degree == "node" and node_size % tensor:
        problem = f"a node has {node_size} processes, which tensor_parallel_degree {tensor} does not divide"
        return [
            Issue(
                "shard-degree-of-a-node-indivisible",
                f"{WHERE}.hybrid_shard_degree",
                problem,
                "node",
                f"Give a number: {_shard_choices(world_size, tensor)}",
            )
        ]
    shard = _shard_degree(spec, world_size, node_size)
    if shard < 1 or (world_size // tensor) % shard:
        problem = (
            f"{world_size} processes / tensor_parallel_degree {tensor} = {world_size // tensor}, which is not a "
            f"multiple of {shard}"
        )
        return [
            Issue(
                "shard-degree-not-dividing-processes",
                f"{WHERE}.hybrid_shard_degree",
                problem,
                shard,
                f"{_shard_choices(world_size, tensor)} works",
            )
        ]
    return _reshard_issues(spec, shard)


def _reshard_issues(spec: FsdpSpec, shard: int) -> list[Issue]:
    kept = spec.reshard_after_forward
    if isinstance(kept, bool) or (1 < kept < shard and shard % kept == 0):
        return []
    fits = [d for d in divisors(shard) if 1 < d < shard]
    remedy = f"{listed(fits)} works, or true or false" if fits else "Use true or false"
    problem = f"must divide the shard degree {shard} and be neither 1 nor {shard}"
    return [Issue("reshard-degree-indivisible", f"{WHERE}.reshard_after_forward", problem, kept, remedy)]


def _shard_degree(spec: FsdpSpec, world_size: int, node_size: int) -> int:
    if spec.sharding == "none":
        return 1
    if spec.sharding == "full":
        return world_size // spec.tensor_parallel_degree
    if spec.hybrid_shard_degree == "node":
        return node_size // spec.tensor_parallel_degree
    return spec.hybrid_shard_degree


def _shard_choices(world_size: int, tensor: int) -> str:
    return listed(divisors(world_size // tensor))


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def listed(values: list[int], longest: int = 8) -> str:
    """``1, 2, 4``, or the first few."""
    shown = values if len(values) <= longest else values[:longest]
    return ", ".join(map(str, shown)) + (", ..." if shown is not values else "")
