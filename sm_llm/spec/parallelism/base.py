"""What plan, images, memory estimate, backends and checks ask of a strategy: its class of options answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.base import SpecModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.spec.machines.hardware import Instance


FP8_UNIT = 16
"""Sizes of a product in fp8, of its matrices and of its tokens, are multiples of this: for ``torch._scaled_mm`` and for
TransformerEngine's kernels."""


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
        # Context-parallel processes are among the shards: they hold different parts of the parameters, too.
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """The data-parallel degree: how many processes, or groups of them, see rows of their own."""
        return self.world_size // (self.pipeline * self.context * self.tensor)

    def data_rank(self, rank: int) -> int:
        """Which of the ``data`` parts of a batch process ``rank`` sees."""
        # The stages of a pipeline, which change slowest with the rank, see the same rows.
        return rank // (self.context * self.tensor) % self.data

    @property
    def loss_parts(self) -> int:
        """Processes whose losses are different summands: tensor-parallel ones compute the same, and of a pipeline's
        stages only the last computes one."""
        return self.data * self.context

    def degrees(self) -> dict[str, int]:
        """Every degree by the name that checkpoints remember it under; that of pipelines where there is one."""
        # A checkpoint of strategies without pipelines keeps the form that earlier versions write and read.
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


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def listed(values: list[int], longest: int = 8) -> str:
    """``1, 2, 4``, or the first few."""
    shown = values if len(values) <= longest else values[:longest]
    return ", ".join(map(str, shown)) + (", ..." if shown is not values else "")


@dataclass(frozen=True)
class Degrees:
    """Processes that share a model or a sequence; what is left of the world holds copies and shards."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def together(self) -> int:
        """Processes that work on the same micro-batch."""
        return self.tensor * self.context * self.pipeline


@dataclass(frozen=True)
class TrainingFacts:
    """What of a training task decides whether a strategy can carry it out."""

    micro_batch_size: int
    seq_length: int
    compiles: bool
    """torch.compile is asked for."""
    compute: str
    """``precision.compute``."""
    samples: bool
    """A text is to be written at the end."""
    master: str = "fp32"
    """``precision.master``."""
    reduce: str = "fp32"
    """``precision.reduce``."""
    moments: str = "master"
    """``precision.moments``."""
    may_compile: bool = False
    """It is left to the planner."""
    chooses_micro_batch: bool = False
    """``micro_batch_size`` is left to the planner, and the one above is the smallest that it may choose."""


@dataclass(frozen=True)
class Capabilities:
    """What a strategy can do. What it cannot is refused where it is asked for."""

    train: bool = True
    """Our own training has a worker for it; a program brings its own, and may ask for the image of any strategy."""
    compiles_layers: bool = True
    """torch.compile of decoder layers."""
    compile_split: tuple[str, ...] = ()
    """Values of ``activation_checkpointing`` with which layers compile whose matrices are split."""
    computes_fp8: bool = False
    """``precision.compute: fp8``."""
    rounds_moments: bool = False
    """``precision.moments: bf16``."""
    plans_memory: bool = False
    """Settings that are ``auto`` are chosen by the memory that they take; else they are the plainest."""
    compiles_ahead: bool = False
    """The precompile task: its graphs can be compiled before the job."""
    reach_programs: bool = False
    """Its options are part of the launch, so that a program of the user's own gets them."""
    needs_kernels: bool = False
    """Training calls the image's compiled kernels: a job fails at its start where they cannot be loaded."""
    forks: bool = False
    """Processes may be forked from one that has imported torch and our code: every process imports the same."""


@dataclass(frozen=True)
class MemoryTerms:
    """What of a strategy decides how much memory a GPU needs (``contract.memory_estimate``)."""

    recomputes: Literal["none", "budget", "selective", "every_nth", "full"] = "none"
    """Which decoder layers the backward pass computes again."""
    budget: float = 1.0
    """budget: the share of its activations that a layer keeps."""
    recomputed_every: int = 1
    """every_nth: one layer in this many."""
    offloads_activations: bool = False
    """Inputs of layers that are computed again wait in host memory."""
    offloads_states: bool = False
    """Parameters, gradients and optimiser state are in host memory."""
    splits_sequence: bool = True
    """With tensor parallelism, activations between the matrices are split as well."""
    resharded: bool | int = True
    """Whether gathered parameters are freed after the forward pass; a number keeps them over so many processes."""
    fuses_loss: bool = False
    """The loss is computed with the output head, in chunks of tokens."""
    delays_copies: bool = False
    """Sums over copies of the shards wait for the last micro-batch."""
    shares_gradients: bool = False
    """Reduced gradients are in memory that the step can use when they are gone."""
    zero1: bool | None = None
    """Whole gradients and parameters on every process, and the optimiser state sharded over its copies, or not; None:
    all of them are sharded."""
    scores: Literal["none", "one", "all"] = "none"
    """Attention scores, [heads, sequence, sequence] of a row, that are there at a time: of no layer, one or all."""


class StrategySpec(SpecModel):
    """Base of every strategy's options. Its defaults are those of an engine for GPUs without a library of its own."""

    strategy: str = ""
    """The training engine; every class has its one name."""

    can: ClassVar[Capabilities] = Capabilities()
    image_stack: ClassVar[Literal["smp", "neuron"] | None] = None
    """The image stack that holds the engine; None if every stack does, and the instance type decides."""
    support: ClassVar[str | None] = None
    """What everybody who trains with the engine should know about its support; None if it is developed."""
    image_marker: ClassVar[str | None] = None
    """Part of the name of every stock image with the engine; None if names do not show it."""

    @property
    def degrees(self) -> Degrees:
        """The degrees that share a micro-batch."""
        return Degrees()

    def degree_issues(self, world_size: int, node_size: int) -> Iterator[Issue]:
        """Degrees that do not fit ``world_size`` processes, ``node_size`` on each node, or one another."""
        shared = self.degrees.together
        # What is left over would be processes without a place in any group: torchrun starts them all the same.
        if world_size % shared:
            problem = (
                f"{shared} processes share a micro-batch, which does not divide the world size: "
                f"{world_size} / {shared} leaves {world_size % shared}"
            )
            remedy = f"Use degrees whose product is one of {listed(divisors(world_size))}"
            yield Issue("degrees-do-not-divide-world-size", "task.parallelism", problem, shared, remedy)

    def arranged(self, world_size: int, node_size: int) -> Layout:
        """``layout`` of degrees that fit. By default parameters are copied over data-parallel ranks, not sharded."""
        tensor, context, pipeline = self.degrees.tensor, self.degrees.context, self.degrees.pipeline
        return Layout(world_size // (tensor * pipeline), context=context, tensor=tensor, pipeline=pipeline)

    def layout(self, world_size: int, node_size: int | None = None) -> Layout:
        """How ``world_size`` processes are arranged, ``node_size`` (None: all) of them on each node.

        Raises ``SpecError`` with the arithmetic and the values that would work.
        """
        if found := list(self.degree_issues(world_size, node_size or world_size)):
            # Where the processes are wrong already, what follows from their number would only mislead.
            raise SpecError([replace(issue, blocked_by=(*issue.blocked_by, "compute")) for issue in found])
        return self.arranged(world_size, node_size or world_size)

    def training_issues(self, training: TrainingFacts) -> Iterator[Issue]:
        """What of a training task the engine cannot do, and options that do not go together."""
        # Refused here and not where it is compiled: the job would pay for its nodes until then.
        if training.compiles and not self.can.compiles_layers:
            yield Issue(
                "compile-unsupported",
                "task.precision.compile",
                "the engine does not go through torch.compile",
                True,
                "Leave it out",
            )
        if training.compute == "fp8" and not self.can.computes_fp8:
            yield Issue(
                "fp8-unsupported",
                "task.precision.compute",
                f"strategy {self.strategy} computes in bf16 and fp32",
                "fp8",
                "Use bf16, or strategy fsdp",
            )
        if training.moments != "master" and not self.can.rounds_moments:
            yield Issue(
                "moments-unsupported",
                "task.precision.moments",
                f"strategy {self.strategy} keeps AdamW's moments in the format of its parameters",
                training.moments,
                "Leave it out, or use strategy fsdp",
            )

    def instance_issues(self, machine: Instance, where: str) -> Iterator[Issue]:
        """Why the engine does not run on an instance type, which the field ``where`` names."""
        # torch has no CUDA device there, and NxD's strategy is the only one that compiles for NeuronCores.
        if machine.is_neuron:
            problem = f"{self.strategy} does not run on Trainium"
            yield Issue(
                "strategy-not-for-trainium", where, problem, machine.name, "Use strategy nxd, or a GPU instance"
            )

    def environment(self, storage: str) -> dict[str, str]:
        """Variables that the engine reads, for a job whose runs are below ``storage``."""
        return {}

    def result_shards(self) -> Mapping[str, Any] | None:
        """Options of ``convert`` for the model that a training publishes; None publishes a Hugging Face folder."""
        return None

    def arrangement(self, key_value_heads: int) -> str | None:
        """The degrees in words, for a model with so many key/value heads; None where the plan shows enough."""
        return None

    def memory(self) -> MemoryTerms:
        """What the memory estimate counts."""
        return MemoryTerms()

    def library_parameters(self, seed: int) -> dict[str, Any] | None:
        """What the engine's own library is started with, ``seed`` being the task's; None if it has none.

        SageMaker's estimator and requests pass them on as ``modelparallel``, the only library that they know.
        """
        return None
