"""How much memory of a GPU or NeuronCore a training takes at its peak, from the specification alone: an estimate.

Parameters, gradients and AdamW's moments after ZeRO (Rajbhandari et al. 2020, section 3): each divided over the shards.
What the backward pass needs of a layer is counted tensor by tensor in transformers' layers (``Family.layer_widths``),
as Korthikanti et al. (2022, section 4) did for Megatron's; attention never writes its scores (FlashAttention). The
parts of a step do not have their peaks together: three moments are computed, and the largest is the estimate.
``tests/launcher/test_memory.py`` compares it with what was allocated on GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.models.families.table import family
from sm_llm.models.parallel import kv_heads
from sm_llm.spec.machines.hardware import EFFICIENT, attention_kernel
from sm_llm.spec.tasks import plainest, settled_compute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.contract.fp8_products import Fp8Products
    from sm_llm.models.families.family import Config, LayerWidths
    from sm_llm.spec.derive import Derived
    from sm_llm.spec.machines.hardware import Card
    from sm_llm.spec.parallelism.base import Layout, MemoryTerms
    from sm_llm.spec.tasks import PrecisionSpec, TrainTask

GIB = 2**30
RESERVED_BYTES = 1.5 * GIB
"""For the CUDA context and NCCL's buffers, which no tensor shows."""
SLACK = 0.06
"""Share of what is allocated that torch's allocator holds in addition: 1 to 6% on H200s (docs/benchmarks.md)."""
MOST_SLACK = 3.5 * GIB
"""However much is allocated: 1.3 to 5.0 GiB beyond 50 on H200s. What exceeds it is within the planner's margin."""
LOGITS_SHARE = 1 / 32
"""Of a GPU's memory, for the logits of one chunk (``worker.strategies.fsdp.loss.logit_bytes``)."""
_UNSHARED = 0.6
"""Of gradients that may share the step's memory, what did not on one H200: their pieces are larger than most others."""
_FP32 = 4
SIZES = {"fp32": 4, "bf16": 2, "fp8": 2}
"""Bytes of an element of parameters and activations that are not inside of products."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU or NeuronCore at the peak of a step, as they are divided in that moment."""

    states: float
    """Parameters, AdamW's two moments, and the gradients that there are."""
    working: float
    """Parameters gathered for the layers at work, or transposed for the backward pass, gradients to be reduced."""
    activations: float
    """What the backward pass still needs of the layers, and of the one that is computed again."""
    logits: float
    """Logits, those of one chunk where the loss is computed in chunks, and the gradients made of them."""
    apart: float = 0.0
    """Free memory that FSDP's own streams keep, which nothing else can take."""

    @property
    def total(self) -> float:
        """All parts that are allocated."""
        return self.states + self.working + self.activations + self.logits

    @property
    def by_card(self) -> float:
        """What the card shows as taken: with what the allocator loses and keeps, and what no tensor shows."""
        return self.total + self.slack + self.apart + RESERVED_BYTES

    @property
    def slack(self) -> float:
        """What the allocator holds beyond what is allocated, between its blocks."""
        return min(SLACK * self.total, MOST_SLACK)

    def describe(self, card: Card) -> str:
        """``about 34.2 of 40 GiB: states 12.6, …``, parts that add up to what the card shows."""
        parts = {name: getattr(self, name) for name in ("states", "working", "activations", "logits")}
        parts["the allocator's gaps"] = self.slack
        if self.apart:
            parts["FSDP's streams"] = self.apart
        parts["the runtime" if card.is_neuron else "CUDA and NCCL"] = RESERVED_BYTES
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
        return f"about {self.by_card / GIB:.1f} of {card.gib:.4g} GiB: {listed}"

    def warnings(self, card: Card, remedy: str = "") -> Iterator[Issue]:
        """Where it probably does not fit, with what would help (``memory_remedy``)."""
        if self.by_card <= card.gib * GIB:
            return
        message = f"this training probably runs out of memory: {self.describe(card)}"
        yield warning("memory-probably-short", "task.micro_batch_size", message, remedy=remedy)


def memory_estimate(config: Config, task: TrainTask, derived: Derived, node_size: int, card: Card) -> MemoryEstimate:
    """The peak of one GPU or core of ``card`` in training a canonical ``config``, ``node_size`` of them a node.

    The degrees were checked before. Settings that are ``auto`` count as the plainest, ``precision.compute`` as what a
    worker on ``card`` makes of it.
    """
    # Each strategy's own class states what it shards, keeps and computes again; the arithmetic is common.
    task = settled_compute(plainest(task), has_bf16=card.has_bf16)
    terms = task.parallelism.memory()
    arranged = task.parallelism.layout(derived.world_size, node_size)
    if terms.zero1 is not None:
        return _of_a_stage(config, task, terms, arranged, derived)
    step = _Step.of(config, task, terms, arranged, derived, _repeated_keys(config, task, card))
    if not terms.fuses_loss:
        return _together(step, tokens_of(derived, arranged))
    loss = _loss_bytes(config, step, tokens_of(derived, arranged), card)
    moments = (_at_the_loss(step, loss), _into_the_backward(step), _at_the_end(step))
    return replace(max(moments, key=lambda it: it.total), apart=step.apart)


def memory_remedy(task: TrainTask, card: Card) -> str:
    """What would let a training take less of ``card``, and is not done yet."""
    terms, is_split = task.parallelism.memory(), task.parallelism.degrees.tensor > 1
    ways = []
    if task.micro_batch > 1 and not card.is_neuron:
        ways.append("lower task.micro_batch_size")
    # Layers with split matrices do not compile with all ways of checkpointing.
    compiled_split = task.parallelism.can.compile_split if is_split and task.precision.compile is True else ()
    kind = "full" if not compiled_split or "full" in compiled_split else compiled_split[-1]
    if terms.recomputes not in ("full", kind):
        ways.append(f"set task.parallelism.activation_checkpointing to {kind}")
    ways.append("raise the tensor- or pipeline-parallel degree" if card.is_neuron else "shard over more GPUs")
    text = f"{', '.join(ways[:-1])}{', or ' if ways[1:] else ''}{ways[-1]}"
    return f"{text[0].upper()}{text[1:]}"


def state_bytes(precision: PrecisionSpec) -> int:
    """Bytes of a parameter and AdamW's two moments between steps."""
    master = SIZES[precision.master]
    return master + 2 * (master if precision.moments == "master" else SIZES[precision.moments])


def tokens_of(derived: Derived, arranged: Layout) -> int:
    """Tokens of a micro-batch that one process computes."""
    return derived.micro_batch_size * derived.seq_length // arranged.context


@dataclass(frozen=True)
class _Parameters:
    """Numbers of parameters that a GPU computes with, after tensor and expert parallelism."""

    all: float
    root: float
    """Token table, output head and the last norm."""
    layer: float
    head: float
    """What is gathered with the output head: the head, or the table that is its weight as well."""

    @classmethod
    def of(cls, config: Config, arranged: Layout) -> _Parameters:
        layers, root = 0.0, 0.0
        for name, tensor in family(config).tensors(config).items():
            if ".layers." not in name:
                root += tensor.size / arranged.tensor
            else:
                # Expert parallelism divides the experts, tensor parallelism everything else.
                layers += tensor.size / (arranged.expert if ".experts." in name else arranged.tensor)
        table = family(config).vocab_size(config) * int(config["hidden_size"]) / arranged.tensor
        # With less than two tables outside the layers, the head is the token table itself.
        head = root - table if root >= 2 * table else root
        return cls(layers + root, root, layers / int(config["num_hidden_layers"]), head)


@dataclass(frozen=True)
class _Step:
    """What every moment of a step is made of, in bytes of one GPU."""

    parts: _Parameters
    compute: int
    """Of an element of activations and gathered parameters."""
    reduce: int
    """Of an element of gradients that are summed over processes."""
    lasting: float
    """Parameters and AdamW's moments, rounded copies, and what earlier micro-batches have left of gradients."""
    gradients: float
    """What the last micro-batch adds to them."""
    gathers: bool
    """Parameters are sharded: they are gathered for each layer, and gradients reduced."""
    kept_gathered: float
    """Parameters, in elements, that stay gathered after the forward pass."""
    kept: float
    """What all layers keep for the backward pass."""
    whole: float
    """What one layer keeps where nothing is computed again."""
    transposed: float
    """Weights that were gathered in fp8, transposed for the backward pass, which compiled layers keep from the forward
    pass. Inferred: peaks of 8B on two H200s were above all else by 0.8 bytes a parameter of the layers."""
    computes_again: bool
    vocabulary: float
    """Entries whose logits this GPU computes."""
    apart: float
    """See ``_apart``."""

    @classmethod
    def of(
        cls, config: Config, task: TrainTask, terms: MemoryTerms, arranged: Layout, derived: Derived, repeated: int
    ) -> _Step:
        precision, parts = task.precision, _Parameters.of(config, arranged)
        compute = SIZES[precision.compute]
        master, shard = SIZES[precision.master], parts.all / arranged.shard
        # One process shards nothing: FSDP is not applied, and there is nothing to gather or to reduce.
        alone = arranged.world_size == 1 and not terms.offloads_states
        accumulates = derived.accumulation_steps > 1
        # One process keeps rounded copies of its masters, and the last micro-batch's gradients in their format.
        copies = compute if alone and compute != master else 0
        # Sums over shards wait for the last micro-batch before copies add them up.
        delayed = terms.delays_copies and arranged.replicate > arranged.expert and accumulates
        earlier = SIZES[precision.reduce] if delayed else master if accumulates else 0
        own = copies or (master if delayed or not accumulates else 0)
        if terms.offloads_states:
            lasting, gradients = shard * earlier if delayed else 0.0, 0.0
        else:
            lasting, gradients = shard * (state_bytes(precision) + copies + earlier), shard * own
        # Weights in host memory are gathered in bf16.
        in_fp8 = 0 if alone or terms.offloads_states else _gathered_in_fp8(config, precision, arranged)
        # Gathered parameters are freed after the forward pass, or kept, whole or divided over that many processes. A
        # weight in fp8 is half as large.
        kept_gathered = 0.0 if terms.resharded is True else (parts.all - in_fp8 / 2) / (terms.resharded or 1)
        tokens = tokens_of(derived, arranged)
        kept, whole = activation_bytes(config, terms, arranged, task.precision, repeated)
        again = _recomputed_layers(config, terms)
        transposed = in_fp8 * (1 - again / int(config["num_hidden_layers"])) if precision.compile is True else 0.0
        return cls(
            parts, compute, SIZES[precision.reduce], lasting, gradients, not alone, kept_gathered,
            tokens * kept, tokens * whole, transposed, again > 0, family(config).vocab_size(config) / arranged.tensor,
            0.0 if alone else _apart(parts, compute, 0.0 if earlier else shard * master, terms),
        )  # fmt: skip

    def gathered(self, elements: float) -> float:
        """Bytes of parameters gathered while ``elements`` of them are at work."""
        if not self.gathers:
            return 0.0
        return self.compute * min(self.parts.all, max(self.kept_gathered, elements + self.kept_gathered))

    def unreduced(self, elements: float) -> float:
        """Bytes of gradients of ``elements`` parameters on their way to the shards: as computed, and as summed."""
        return (self.compute + self.reduce) * elements if self.gathers else 0.0


def _gathered_in_fp8(config: Config, precision: PrecisionSpec, arranged: Layout) -> int:
    """Parameters of all layers that are gathered in fp8, which no tensor parallelism divides."""
    if precision.compute != "fp8":
        return 0
    return int(config["num_hidden_layers"]) * _products(config).gathered(arranged.shard)


def _products(config: Config) -> Fp8Products:
    # Imported here: most trainings compute nothing in fp8.
    from sm_llm.contract.fp8_products import fp8_products

    return fp8_products(config)


def _computed_from_norms(config: Config, widths: LayerWidths) -> int:
    """Of what norms and activations give, all that products in fp8 alone take: it is computed again."""
    fitting = _products(config).fitting
    return sum(width for takers, width in widths.cheap.items() if all(it in fitting for it in takers))


def _recomputed_layers(config: Config, terms: MemoryTerms) -> int:
    """How many layers the backward pass computes again."""
    if terms.recomputes in ("none", "budget"):
        return 0
    layers = int(config["num_hidden_layers"])
    return -(-layers // terms.recomputed_every) if terms.recomputes == "every_nth" else layers


def _apart(parts: _Parameters, compute: int, gradients: float, terms: MemoryTerms) -> float:
    """Buffers of gathers in flight, and of the gradients what finds no free memory of the step that is large enough.

    Those that earlier micro-batches have left are no free memory, and are counted as what they are.
    """
    return compute * (parts.head + parts.layer) + (_UNSHARED if terms.shares_gradients else 1.0) * gradients


def _at_the_loss(step: _Step, loss: float) -> MemoryEstimate:
    """All activations are there, and no gradient yet but the output head's."""
    working = step.gathered(step.parts.head + step.parts.layer)  # the layer before is not freed yet
    return MemoryEstimate(step.lasting, working + step.transposed, step.kept, loss)


def _into_the_backward(step: _Step) -> MemoryEstimate:
    """The gradient of the head is reduced while the last layer's backward pass runs, and the one before is gathered."""
    # The layer at work, and the one before it, which FSDP gathers ahead of its use.
    layers = 2 * step.parts.layer
    working = step.gathered(layers) + step.unreduced(step.parts.head) + step.unreduced(step.parts.layer)
    working += step.transposed
    again = step.whole if step.computes_again else 0.0
    head = 0.0 if step.gathers else step.compute * step.parts.head
    return MemoryEstimate(step.lasting, working, step.kept + again, head)


def _at_the_end(step: _Step) -> MemoryEstimate:
    """All gradients are there, and the activations of one layer."""
    ends = max(step.parts.root - step.parts.head, step.parts.layer)
    working = step.gathered(2 * step.parts.layer) + step.unreduced(ends)
    return MemoryEstimate(step.lasting + step.gradients, working, step.whole, 0.0)


def _together(step: _Step, tokens: int) -> MemoryEstimate:
    """An engine with whole logits in fp32: nearly all parts have their peak where the backward pass begins."""
    gathered = step.compute * (step.parts.root + 2 * step.parts.layer)
    largest = max(step.parts.root, 2 * step.parts.layer)
    unreduced = step.compute * (step.parts.root + step.parts.layer) + step.reduce * largest
    again = step.whole if step.computes_again else 0.0
    # In the format of the computation, as fp32, and the gradient of those.
    logits = tokens * step.vocabulary * (step.compute + 2 * _FP32)
    states = step.lasting + step.gradients
    return MemoryEstimate(states, gathered + unreduced if step.gathers else 0.0, step.kept + again, logits)


def _of_a_stage(
    config: Config, task: TrainTask, terms: MemoryTerms, arranged: Layout, derived: Derived
) -> MemoryEstimate:
    """The peak of a core of an engine that shards nothing but the optimiser state, of the stage that holds most.

    The last one has the output head and the layers that the division leaves over; the first keeps the activations of
    as many micro-batches as there are stages (one forward, one backward in turn: Narayanan et al. 2021, section 2.2).
    Of what goes into the matrices a core keeps its own part of the sequence, and gathers the rest once more.
    """
    kind, stages, tensor = family(config), arranged.pipeline, arranged.tensor
    compute = SIZES[task.precision.compute]
    parts, widths = _Parameters.of(config, arranged), kind.layer_widths(config)
    # Rounded up: the estimate is that of the fullest stage.
    layers = -(-int(config["num_hidden_layers"]) // stages)
    held = parts.layer * layers + (parts.root if stages == 1 else parts.head)
    # ZeRO-1 keeps an fp32 copy of the parameters beside those that compute.
    masters = _FP32 if terms.zero1 else 0
    gradients = SIZES[task.precision.reduce] if terms.zero1 else compute
    around = tensor if terms.splits_sequence else 1
    outside = (_FP32 * widths.in_fp32 + compute * (widths.around + widths.inputs)) / around
    whole = outside + compute * widths.inside / tensor
    kept = layers * compute * widths.hidden / around + whole if terms.recomputes == "full" else layers * whole
    tokens = tokens_of(derived, arranged)
    scored = {"none": 0, "one": 1, "all": layers}[terms.scores]
    scores = int(config["num_attention_heads"]) / tensor * derived.seq_length * (2 * compute + _FP32) * scored
    # No more micro-batches can be under way than a step has.
    waiting = min(stages, derived.accumulation_steps)
    return MemoryEstimate(
        states=held * (compute + (masters + 2 * _FP32) / (arranged.data if terms.zero1 else 1)),
        working=held * gradients,
        activations=tokens * (waiting * kept + scores),
        logits=tokens * kind.vocab_size(config) / tensor * (compute + 3 * _FP32),
    )


def _loss_bytes(config: Config, step: _Step, tokens: int, card: Card) -> float:
    """Logits of one chunk, the gradient of the head's weight, the head's inputs and their gradient.

    The sizes of chunks are those of ``worker.strategies.fsdp.loss``.
    """
    row = step.compute * step.vocabulary
    # As many chunks as keep the logits of one below their share of the memory.
    chunks = math.ceil(tokens * row / (card.gib * GIB * LOGITS_SHARE))
    weight = (step.compute if chunks <= 1 else _FP32) * step.parts.head
    return tokens * row / max(1, chunks) + weight + 2 * tokens * step.compute * int(config["hidden_size"])


def _repeated_keys(config: Config, task: TrainTask, card: Card) -> int:
    """Elements of a token that a layer keeps more where grouped key heads are repeated for attention's kernel."""
    if expected_attention(config, task, card) != EFFICIENT:
        return 0
    return 2 * (int(config["num_attention_heads"]) - kv_heads(config)) * family(config).head_dim(config)


def expected_attention(config: Config, task: TrainTask, card: Card) -> str | None:
    """The kernel that should compute attention on ``card`` (``attention_kernel``); None with others' engines."""
    if not task.parallelism.can.plans_memory or card.is_neuron:
        return None
    kind, length = family(config), task.data.seq_length
    return attention_kernel(
        card.name,
        task.precision.compute,
        kind.head_dim(config),
        in_window=kind.attention_span(config, length) < length,
        is_shared=task.parallelism.degrees.context > 1,
        drops=bool(config.get("attention_dropout")),
    )


def activation_bytes(
    config: Config, terms: MemoryTerms, arranged: Layout, precision: PrecisionSpec, repeated: int = 0
) -> tuple[float, float]:
    """Per token of one process: what all layers keep for the backward pass, and one where nothing is computed again.

    ``repeated``: elements of keys and values that a layer keeps beyond its own heads.
    """
    compute = SIZES[precision.compute]
    widths, layers = family(config).layer_widths(config), int(config["num_hidden_layers"])
    around = arranged.tensor if terms.splits_sequence else 1
    boundary = compute * widths.hidden / around
    if precision.compile is True:
        # From what they take, where products are in fp8.
        again = _computed_from_norms(config, widths) if precision.compute == "fp8" else 0
        outside = widths.inputs + widths.around / around
        inside = widths.compiled - again - widths.inputs - widths.around
        whole = compute * (outside + inside / arranged.tensor)
    else:
        outside = (_FP32 * widths.in_fp32 + compute * widths.around) / around
        whole = outside + compute * (widths.inputs + widths.inside / arranged.tensor)
    whole += compute * repeated / arranged.tensor
    if terms.recomputes == "none":
        return layers * whole, whole
    if terms.recomputes == "budget":
        return layers * min(whole, boundary + terms.budget * (compute * widths.compiled - boundary)), whole
    if terms.recomputes == "selective":
        # A compiled layer leaves out the last product, which is the next layer's input.
        outer = 0.0 if precision.compile is True else widths.products_around / around
        kept = boundary + compute * (outer + widths.products / arranged.tensor)
    else:
        kept = 0.0 if terms.offloads_activations else boundary
    recomputed = _recomputed_layers(config, terms)
    return (layers - recomputed) * whole + recomputed * kept, whole
