"""The strategy ``fsdp``: PyTorch's own FSDP2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from sm_llm.errors import Issue
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
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator


# The default, by which a value that was typed without the kind budget is recognised.
_BUDGET = 0.7
# Ways of checkpointing that compute whole layers again, so that their inputs can be offloaded.
_OFFLOADABLE = ("auto", "full", "every_nth")


class FsdpSpec(StrategySpec):
    """PyTorch FSDP2, alone or multiplied with tensor and context parallelism."""

    can: ClassVar[Capabilities] = Capabilities(
        computes_fp8=True,
        rounds_moments=True,
        plans_memory=True,
        forks=True,
        compile_split=("none", "selective"),
    )

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
    async_tensor_parallel: bool = False
    """Overlap the gathers and sums of sequence parallelism with the matrix products beside them: in compiled layers, on
    GPUs of one node that read one another's memory (torch's symmetric memory). Measured on two H200s: 1.6% faster."""
    context_parallel_degree: int = Field(default=1, ge=1, le=65_536)
    """Split every sequence over this many processes, each with two chunks of it."""
    activation_checkpointing: Literal["auto", "none", "budget", "selective", "every_nth", "full"] = "auto"
    """What the backward pass computes again: nothing, what torch.compile picks to stay within activation_memory_budget,
    all but attention and every second matrix product, every n-th decoder layer, or every one. ``auto``: the fastest of
    these, in this order, that fits in a GPU's memory."""
    activation_memory_budget: float = Field(default=_BUDGET, gt=0, lt=1)
    """budget only: the share of a layer's activations that its compiled graph may keep."""
    checkpoint_every_layers: int = Field(default=2, ge=2, le=10_000)
    """every_nth only: one decoder layer in this many is computed again."""
    offload_activations: bool = False
    """Keep the inputs of the layers that are computed again in host memory until then."""
    offload_optimizer: bool = False
    """Keep sharded parameters, gradients and optimiser state in host memory, and update them there."""
    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    """Free gathered parameters after the forward pass (less memory, one more all-gather); a number keeps them sharded
    over that many processes. ``auto``: false where the memory allows it."""

    copy_engine_collectives: bool | Literal["auto"] = "auto"
    """Gather parameters and add up gradients by the copy engines of the GPUs of a node (torch's symmetric memory), in
    place of NCCL's kernels, which take multiprocessors from the matrix products beside them. Gradients travel as they
    were computed, in bf16, and are added up in fp32. ``auto``: where all GPUs that share a copy are on one node and
    joined by NVLink, since Hopper, if not ``deterministic``; the worker reports it. ``true``: on other GPUs, too."""
    share_gradient_memory: bool = False
    """On GPUs, put reduced gradients into the memory of the computing stream, which the forward pass can use:
    less is reserved. It has not run on several GPUs yet, so compare losses."""

    @property
    def degrees(self) -> Degrees:
        # No pipeline: FSDP2 shards layers, and every process runs all of them.
        return Degrees(self.tensor_parallel_degree, self.context_parallel_degree)

    def degree_issues(self, world_size: int, node_size: int) -> Iterator[Issue]:
        # Shards divide what tensor parallelism leaves: with wrong degrees, their issues would only follow from those.
        yield from _degree_issues(self, world_size) or _shard_issues(self, world_size, node_size)

    def arranged(self, world_size: int, node_size: int) -> Layout:
        shard = _shard_degree(self, world_size, node_size)
        tensor, context = self.tensor_parallel_degree, self.context_parallel_degree
        return Layout(world_size // (tensor * shard), shard, context, tensor)

    def training_issues(self, training: TrainingFacts) -> Iterator[Issue]:
        yield from super().training_issues(training)
        yield from _option_issues(self)
        if self.offload_activations and self.activation_checkpointing not in _OFFLOADABLE:
            yield from _offloading_issues(self, training)
        yield from _sequence_issues(self, training.seq_length)
        yield from _budget_issues(self, compiles=training.compiles or training.may_compile)
        if self.copy_engine_collectives is True:
            yield from _copy_engine_issues(self)
        if self.offload_optimizer and training.moments != "master":
            # torch's AdamW for CPUs wants them in the format of the parameters.
            problem = "with offload_optimizer the moments are in host memory, in the format of the parameters"
            remedy = "Leave it out, or set task.parallelism.offload_optimizer to false"
            yield Issue("moments-with-offloading", "task.precision.moments", problem, training.moments, remedy)
        if self.async_tensor_parallel:
            yield from _overlap_issues(self, training)
        if self.share_gradient_memory:
            yield from _shared_memory_issues(self, training)
        if training.compute == "fp8":
            yield from _fp8_issues(self, training)
        if self.tensor_parallel_degree > 1:
            yield from _split_compile_issues(self, training)

    def memory(self) -> MemoryTerms:
        return MemoryTerms(
            recomputes="none" if self.activation_checkpointing == "auto" else self.activation_checkpointing,
            budget=self.activation_memory_budget,
            recomputed_every=self.checkpoint_every_layers,
            offloads_activations=self.offload_activations,
            offloads_states=self.offload_optimizer,
            splits_sequence=self.sequence_parallel,
            resharded=True if self.reshard_after_forward == "auto" else self.reshard_after_forward,
            fuses_loss=True,
            delays_copies=True,
            shares_gradients=self.share_gradient_memory,
        )


def _option_issues(spec: FsdpSpec) -> list[Issue]:
    """Options that do not go together, whatever the number of processes."""
    issues = []
    # An option that equals its default cannot be distinguished from one that was left out.
    if spec.hybrid_shard_degree != "node" and spec.sharding != "hybrid":
        remedy = "Set task.parallelism.sharding to hybrid, or leave it out"
        issues.append(
            Issue(
                "shard-degree-without-effect",
                "task.parallelism.hybrid_shard_degree",
                "is for sharding: hybrid",
                spec.hybrid_shard_degree,
                remedy,
            )
        )
    if spec.checkpoint_every_layers != 2 and spec.activation_checkpointing != "every_nth":
        problem = f"is for activation_checkpointing: every_nth, and this is {spec.activation_checkpointing}"
        remedy = "Set task.parallelism.activation_checkpointing to every_nth, or leave it out"
        issues.append(
            Issue(
                "checkpoint-interval-without-effect",
                "task.parallelism.checkpoint_every_layers",
                problem,
                spec.checkpoint_every_layers,
                remedy,
            )
        )
    return issues


def _offloading_issues(spec: FsdpSpec, training: TrainingFacts) -> Iterator[Issue]:
    # Those that would have something to offload do not compile with split matrices.
    others = "" if spec.tensor_parallel_degree > 1 and training.compiles else ", or use activation_checkpointing full"
    yield Issue(
        "offloading-without-checkpointing",
        "task.parallelism.offload_activations",
        f"has nothing to offload with activation_checkpointing: {spec.activation_checkpointing}",
        True,
        f"Leave it out{others}{' or every_nth' if others else ''}",
    )


def _budget_issues(spec: FsdpSpec, *, compiles: bool) -> Iterator[Issue]:
    kind = spec.activation_checkpointing
    if kind == "budget" and not compiles:
        # With split matrices no layer compiles that has a budget.
        is_split = spec.tensor_parallel_degree > 1
        yield Issue(
            "budget-without-compile",
            "task.parallelism.activation_checkpointing",
            "the budget is torch.compile's, and precision.compile is off",
            kind,
            "Use selective" if is_split else "Set task.precision.compile to true, or use selective",
        )
    if spec.activation_memory_budget != _BUDGET and kind != "budget":
        yield Issue(
            "budget-without-effect",
            "task.parallelism.activation_memory_budget",
            f"is for activation_checkpointing: budget, and this is {kind}",
            spec.activation_memory_budget,
            "Set task.parallelism.activation_checkpointing to budget, or leave it out",
        )


def _compiles_split(spec: FsdpSpec) -> bool:
    """Whether layers with split matrices compile with what the backward pass computes again."""
    kind = spec.activation_checkpointing
    # Layers whose inputs are offloaded are computed again.
    return not spec.offload_activations if kind == "auto" else kind in spec.can.compile_split


def _split_compile_issues(spec: FsdpSpec, training: TrainingFacts) -> Iterator[Issue]:
    kind = spec.activation_checkpointing
    # A budget is for compiled layers alone.
    if not _compiles_split(spec) and (training.compiles or (training.may_compile and kind == "budget")):
        ways = [f"use {' or '.join(spec.can.compile_split)}"] if kind != "auto" else []
        # Offloading takes the inputs of layers that are computed again.
        ways = [" and ".join(["leave offload_activations out", *ways])] if spec.offload_activations else ways
        ways += ["set task.precision.compile to false"] if kind != "budget" else []
        remedy = ", or ".join(ways)
        yield Issue(
            "compile-with-tensor-parallelism",
            "task.parallelism.activation_checkpointing",
            "torch 2.13 cannot compile layers that are computed again so and whose matrices are split: their graphs "
            "would hold a DeviceMesh",
            kind,
            f"{remedy[0].upper()}{remedy[1:]}",
        )


def _overlap_issues(spec: FsdpSpec, training: TrainingFacts) -> Iterator[Issue]:
    """Where no gather stands beside a matrix product in a compiled graph."""
    # The planner does not compile layers with split matrices.
    eager = f"precision.compile: {'auto' if training.may_compile else 'false'}"
    reasons = {
        "tensor_parallel_degree: 1": spec.tensor_parallel_degree == 1,
        "sequence_parallel: false": not spec.sequence_parallel,
        eager: not training.compiles,
    }
    if found := [name for name, holds in reasons.items() if holds]:
        problem = f"has no effect with {', '.join(found)}"
        remedy = "Leave it out"
        if found == [eager] and _compiles_split(spec):
            remedy = "Set task.precision.compile to true, or leave it out"
        yield Issue("overlap-without-effect", "task.parallelism.async_tensor_parallel", problem, True, remedy)


def _copy_engine_issues(spec: FsdpSpec) -> Iterator[Issue]:
    """Where nothing is gathered on GPUs."""
    kept = spec.reshard_after_forward
    reasons = {
        f"sharding: {spec.sharding}": spec.sharding == "none",
        "offload_optimizer": spec.offload_optimizer,
        # Parts of a copy are gathered as well, by groups of their own.
        f"reshard_after_forward: {kept}": not isinstance(kept, bool | str),
    }
    if found := [name for name, holds in reasons.items() if holds]:
        problem = f"has no effect with {', '.join(found)}"
        yield Issue("copies-without-effect", "task.parallelism.copy_engine_collectives", problem, True, "Leave it out")


def _shared_memory_issues(spec: FsdpSpec, training: TrainingFacts) -> Iterator[Issue]:
    """Results that are copied, summed again or converted are dropped at once, on streams of their own."""
    reasons = {
        "offload_optimizer": spec.offload_optimizer,
        f"sharding: {spec.sharding}": spec.sharding != "full",
        f"precision.reduce: {training.reduce} of {training.master} masters": training.reduce != training.master,
    }
    if found := [name for name, holds in reasons.items() if holds]:
        yield Issue(
            "gradient-memory-without-effect",
            "task.parallelism.share_gradient_memory",
            f"has no effect with {', '.join(found)}",
            True,
            "Leave it out",
        )


def _fp8_issues(spec: FsdpSpec, training: TrainingFacts) -> Iterator[Issue]:
    if spec.tensor_parallel_degree > 1:
        yield Issue(
            "fp8-with-tensor-parallelism",
            "task.precision.compute",
            "matrices that processes share are not computed in fp8",
            "fp8",
            "Use bf16, or tensor_parallel_degree 1",
        )
    length, size, context = training.seq_length, training.micro_batch_size, spec.context_parallel_degree
    # The matrices themselves are checked with the model (``launcher.planning.checks``): its sizes are not known here.
    if size * length // context % FP8_UNIT == 0:
        return
    whole = FP8_UNIT * context
    unit = math.lcm(_sequence_unit(spec), whole // math.gcd(whole, size))
    ways = [f"Use a multiple of {unit}"]
    # A sequence that cannot be cut is no better in another micro-batch.
    if length % _sequence_unit(spec) == 0:
        ways.append(f"set task.micro_batch_size to a multiple of {whole // math.gcd(whole, length)}")
    smallest = (
        " with one sequence, which task.micro_batch_size: auto may choose" if training.chooses_micro_batch else ""
    )
    yield Issue(
        "fp8-tokens-not-divisible",
        "task.data.seq_length",
        f"fp8 takes micro-batches of a multiple of {FP8_UNIT} tokens a GPU, and this makes "
        f"{size * length // context}{smallest}",
        length,
        ", or ".join(ways),
    )


def _sequence_unit(spec: FsdpSpec) -> int:
    """What the length of a sequence must be a multiple of."""
    context, tensor = spec.context_parallel_degree, spec.tensor_parallel_degree if spec.sequence_parallel else 1
    # The part of a process must consist of two equal chunks and be divisible over the tensor-parallel processes.
    return context * math.lcm(2, tensor) if context > 1 else tensor


def _sequence_issues(spec: FsdpSpec, seq_length: int) -> list[Issue]:
    """Whether a sequence can be cut: into two chunks per context-parallel process, those over tensor-parallel ones."""
    context, tensor = spec.context_parallel_degree, spec.tensor_parallel_degree if spec.sequence_parallel else 1
    unit = _sequence_unit(spec)
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
    # The degree that is wrong by itself, or else the one that makes the product wrong.
    name = "tensor_parallel_degree" if world_size % tensor or context == 1 else "context_parallel_degree"
    problem = (
        f"{world_size} processes are not divisible by tensor_parallel_degree x context_parallel_degree = "
        f"{tensor} x {context} = {product}: {world_size} / {product} leaves {world_size % product}"
    )
    # The other degree is taken as meant, so that one change makes the specification right.
    fits = [d for d in divisors(world_size) if name == "tensor_parallel_degree" or world_size % (d * tensor) == 0]
    return [
        Issue(
            "degrees-not-dividing-processes",
            f"task.parallelism.{name}",
            problem,
            getattr(spec, name),
            f"{listed(fits)} divides them",
        )
    ]


def _shard_issues(spec: FsdpSpec, world_size: int, node_size: int) -> list[Issue]:
    tensor = spec.tensor_parallel_degree
    # Before the degree is computed, which would be rounded down here.
    if spec.sharding == "hybrid" and spec.hybrid_shard_degree == "node" and node_size % tensor:
        problem = f"a node has {counted(node_size, 'process')}, which tensor_parallel_degree {tensor} does not divide"
        return [
            Issue(
                "shard-degree-of-a-node-indivisible",
                "task.parallelism.hybrid_shard_degree",
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
                "task.parallelism.hybrid_shard_degree",
                problem,
                shard,
                f"{_shard_choices(world_size, tensor)} works",
            )
        ]
    return [*_reshard_issues(spec, shard), *_reach_issues(spec, shard, node_size)]


def _reach_issues(spec: FsdpSpec, shard: int, node_size: int) -> list[Issue]:
    """Processes that would read the memory of GPUs of another node. Those that do are neighbours."""
    readers = {
        "copy_engine_collectives": shard * spec.tensor_parallel_degree,
        "async_tensor_parallel": spec.tensor_parallel_degree,
    }
    return [
        Issue(
            "reads-across-nodes",
            f"task.parallelism.{name}",
            f"a GPU reads only those of its node, and {count} neighbouring processes read one another on nodes of "
            f"{node_size}",
            True,
            f"Leave it out, or let {listed(divisors(node_size))} processes share",
        )
        for name, count in readers.items()
        if getattr(spec, name) is True and node_size % count
    ]


def _reshard_issues(spec: FsdpSpec, shard: int) -> list[Issue]:
    kept = spec.reshard_after_forward
    # fully_shard takes no trivial divisors: 1 and the whole degree are what false and true mean.
    if isinstance(kept, bool | str) or (1 < kept < shard and shard % kept == 0):
        return []
    fits = [d for d in divisors(shard) if 1 < d < shard]
    remedy = f"{listed(fits)} works, or true or false" if fits else "Use true or false"
    problem = f"must divide the shard degree {shard} and be neither 1 nor {shard}"
    return [Issue("reshard-degree-indivisible", "task.parallelism.reshard_after_forward", problem, kept, remedy)]


def _shard_degree(spec: FsdpSpec, world_size: int, node_size: int) -> int:
    if spec.sharding == "none":
        return 1
    if spec.sharding == "full":
        # Context-parallel processes shard as well, so only tensor parallelism divides the number.
        return world_size // spec.tensor_parallel_degree
    if spec.hybrid_shard_degree == "node":
        return node_size // spec.tensor_parallel_degree
    return spec.hybrid_shard_degree


def _shard_choices(world_size: int, tensor: int) -> str:
    return listed(divisors(world_size // tensor))
