"""How much memory of a GPU a training takes at its peak, from the specification alone: an estimate, part by part.

Parameters, gradients and AdamW's moments after ZeRO (Rajbhandari et al. 2020, section 3): each divided over the shards.
What the backward pass needs of a layer is counted tensor by tensor in transformers' layers (``Family.layer_widths``),
as Korthikanti et al. (2022, section 4) did for Megatron's; attention never writes its scores (FlashAttention).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.models.families.registry import family

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.models.families.family import Config, LayerWidths
    from sm_llm.spec.derive import Derived
    from sm_llm.spec.machines.hardware import Instance
    from sm_llm.spec.parallelism.base import MemoryTerms
    from sm_llm.spec.parallelism.layout import Layout
    from sm_llm.spec.tasks import TrainTask

GIB = 2**30
RESERVED_BYTES = 1.5 * GIB
"""For the CUDA context and NCCL's buffers, which no tensor shows."""
SLACK = 1.05
"""What torchtitan has measured (Llama 3.1 8B on 8 and on 128 H100, December 2024) over this estimate of it."""
_FP32 = 4
_SIZES = {"fp32": 4, "bf16": 2, "fp8": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU at the peak of a step."""

    states: float
    """Parameters, gradients and AdamW's two moments between steps."""
    working: float
    """Parameters gathered for the layers at work, and their gradients before they are reduced."""
    activations: float
    """What the backward pass needs of all layers, and of the one that is computed again."""
    logits: float
    """Logits in the compute format and in fp32, and their gradient."""

    @property
    def total(self) -> float:
        """All parts, as if their peaks came together: they nearly do where the backward pass begins."""
        return self.states + self.working + self.activations + self.logits

    def describe(self, card: Instance) -> str:
        """``about 31 of 40 GiB: states 12.6, …``."""
        parts = ("states", "working", "activations", "logits")
        listed = ", ".join(f"{name} {getattr(self, name) / GIB:.1f}" for name in parts)
        return f"about {self.total / GIB:.1f} of {card.accelerator_gib:g} GiB: {listed}"

    def warnings(self, card: Instance) -> Iterator[Issue]:
        """Where it probably does not fit."""
        if self.total * SLACK + RESERVED_BYTES <= card.accelerator_gib * GIB:
            return
        message = (
            f"this training probably runs out of memory: {self.describe(card)}; the allocator loses {SLACK - 1:.0%}, "
            f"CUDA and NCCL take {RESERVED_BYTES / GIB:g} GiB"
        )
        remedy = "Lower task.micro_batch_size, set activation_checkpointing to full, or shard over more GPUs"
        yield warning("memory-probably-short", "task.micro_batch_size", message, remedy=remedy)


def memory_estimate(config: Config, task: TrainTask, derived: Derived, node_size: int) -> MemoryEstimate | None:
    """The peak of one GPU in training a canonical ``config``, ``node_size`` GPUs a node; None where the strategy
    makes none.

    The degrees were checked before.
    """
    terms = task.parallelism.memory()
    if terms is None:
        return None
    arranged = task.parallelism.layout(derived.world_size, node_size)
    tokens = derived.micro_batch_size * derived.seq_length // arranged.context
    compute = _SIZES["bf16" if task.precision.compute == "auto" else task.precision.compute]
    logits = tokens * family(config).vocab_size(config) / arranged.tensor * (compute + 2 * _FP32)
    parts = _Parameters.of(config, arranged)
    delayed = terms.delays_copies and arranged.replicate > arranged.expert and derived.accumulation_steps > 1
    return MemoryEstimate(
        states=_states(parts, task, terms, arranged, compute, delayed=delayed),
        working=_working(parts, task, terms, arranged, compute),
        activations=tokens * activation_bytes(config, terms, arranged, compute),
        logits=logits,
    )


@dataclass(frozen=True)
class _Parameters:
    """Numbers of parameters that a GPU computes with, after tensor and expert parallelism."""

    all: float
    root: float
    """Token table, output head and the last norm: gathered from the first layer to the last."""
    layer: float

    @classmethod
    def of(cls, config: Config, arranged: Layout) -> _Parameters:
        layers, root = 0.0, 0.0
        for name, tensor in family(config).tensors(config).items():
            if ".layers." not in name:
                root += tensor.size / arranged.tensor
            else:
                layers += tensor.size / (arranged.expert if ".experts." in name else arranged.tensor)
        return cls(layers + root, root, layers / int(config["num_hidden_layers"]))


def _states(
    parts: _Parameters, task: TrainTask, terms: MemoryTerms, arranged: Layout, compute: int, *, delayed: bool
) -> float:
    master = _SIZES[task.precision.master]
    # One process keeps rounded copies of its masters, and their gradients, beside them.
    copies = 2 * compute if arranged.world_size == 1 and compute != master else 0
    # Sums over shards that wait for the last micro-batch before copies add them up.
    waiting = _SIZES[task.precision.reduce] if delayed else 0
    return parts.all / arranged.shard * (waiting + (0 if terms.offloads_states else 4 * master + copies))


def _working(parts: _Parameters, task: TrainTask, terms: MemoryTerms, arranged: Layout, compute: int) -> float:
    reduce = _SIZES[task.precision.reduce]
    if arranged.world_size == 1 and not terms.offloads_states:
        return 0.0
    gathered = parts.root + 2 * parts.layer  # one at work, the next on its way
    if terms.resharded is False:
        gathered = parts.all
    elif terms.resharded is not True:
        gathered += parts.all / terms.resharded
    gradients = compute * (parts.root + parts.layer) + reduce * max(parts.root, 2 * parts.layer)
    return compute * gathered + gradients


def activation_bytes(config: Config, terms: MemoryTerms, arranged: Layout, compute: int) -> float:
    """What all layers keep for the backward pass, per token of one process; ``compute`` is bytes of an element."""
    widths, layers = family(config).layer_widths(config), int(config["num_hidden_layers"])
    around = arranged.tensor if terms.splits_sequence else 1
    whole = _whole(widths, arranged.tensor, around, compute)
    boundary = compute * widths.hidden / around
    again = 0 if terms.recomputes in ("none", "budget") else layers
    if terms.recomputes == "every_nth":
        again = -(-layers // terms.recomputed_every)
    if terms.recomputes == "selective":
        kept = boundary + compute * (widths.products_around / around + widths.products / arranged.tensor)
    else:
        kept = 0.0 if terms.offloads_activations else boundary
    return (layers - again) * whole + again * kept + (whole if again else 0.0)


def _whole(widths: LayerWidths, tensor: int, around: int, compute: int) -> float:
    """Bytes per token that a layer keeps where nothing of it is computed again."""
    outside = (_FP32 * widths.in_fp32 + compute * widths.around) / around
    return outside + compute * (widths.inputs + widths.inside / tensor)
