"""What every model family knows about itself, computed from its config alone: tensors, counts and FLOPs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from sm_llm.errors import Issue
from sm_llm.terminal import exact

Config = Mapping[str, Any]
Group = Literal["matrix", "norm", "bias", "embedding"]
Init = Literal["normal", "ones", "zeros"]
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "laplace",
    "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
"""Names of activation functions that every supported version of transformers has (``ACT2FN``)."""
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", list: "a list"}


@dataclass(frozen=True)
class Tensor:
    """One parameter of a model: its whole shape, its decay group and the distribution of its initial values.

    ``group`` is ``embedding`` for the token table and an untied output head. ``std`` belongs to ``init="normal"``
    (mean 0). ``zero_row`` is a row that starts at zero (the padding token's).
    """

    shape: tuple[int, ...]
    group: Group
    init: Init
    std: float = 0.0
    zero_row: int | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Packing:
    """How transformers 5 keeps published tensors as one parameter.

    The tensors of each part are joined along their first dimension; where ``stacked``, the parts along a new one in
    front (there is one part only where they are not).
    """

    parts: tuple[tuple[str, ...], ...]
    stacked: bool = False

    def tensor(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameter, from the published ``tensors`` by name: all of one distribution and, joined, of one width."""
        first = tensors[self.parts[0][0]]
        rows = sum(tensors[name].shape[0] for name in self.parts[0])
        lead = (len(self.parts),) if self.stacked else ()
        return replace(first, shape=(*lead, rows, *first.shape[1:]))


@dataclass(frozen=True)
class LayerWidths:
    """Elements per token that one decoder layer of transformers keeps for its backward pass.

    ``tests/worker/test_fsdp_memory.py`` counts the tensors.
    """

    hidden: int
    """The layer's input: all that is kept where the layer is computed again."""
    in_fp32: int
    """Copies in fp32 that norms of the residual stream make."""
    around: int
    """What norms and residuals keep in the compute format: not split by tensor parallelism, but by the sequence."""
    inputs: int
    """Inputs of the blocks, whole on every process that shares matrices."""
    inside: int
    """Heads and inner channels, which tensor parallelism splits."""
    products: int
    """Of ``inside``, what selective checkpointing keeps: attention's result and every second matrix product."""
    compiled: int
    """What a compiled layer keeps of all this in the compute format: what is cheap to compute again it does not keep.
    Counted in the graphs of torch 2.11's inductor, and compared with GPUs (``tests/launcher/test_memory.py``)."""
    cheap: Mapping[tuple[str, ...], int]
    """Of ``compiled``, what norms and activation functions give, by the linear layers that take it."""
    products_around: int = 0
    """Results of such products outside of the blocks."""


@dataclass(frozen=True)
class Field:
    """One field of a family's config: the values it takes, and the one transformers gives it when it is absent.

    ``required`` fields have no default. ``safe`` fields may be changed although pretrained weights are loaded,
    because no weight depends on them.
    """

    types: tuple[type, ...]
    default: Any = None
    optional: bool = False
    required: bool = False
    safe: bool = False
    minimum: float | None = None
    maximum: float = 2**31 - 1
    """What is counted one by one, such as layers, has a smaller one."""
    below: float | None = None
    choices: tuple[str, ...] = ()
    """Texts that it may be; any without."""

    def issue(self, name: str, value: Any) -> Issue | None:
        """What is wrong with ``value``, if anything (a bool is not a number, an integer is a float)."""
        if value is None and self.optional:
            return None
        # bool is a subclass of int in Python, but true must not pass for a number.
        if isinstance(value, bool) != (self.types == (bool,)) or not isinstance(value, self.types):
            return Issue("model-field-type", name, f"must be {self.describe()}", value)
        if isinstance(value, list) and int in self.types and not all(type(it) is int and it >= 0 for it in value):
            return Issue("model-field-not-whole-numbers", name, "must be whole numbers, at least 0", value)
        # "not value >= ..." and not "value < ...": NaN must fail, too.
        if self.minimum is not None and isinstance(value, int | float) and not value >= self.minimum:
            return Issue("model-field-too-small", name, f"must be at least {exact(self.minimum)}", value)
        if isinstance(value, int | float) and not value <= self.maximum:
            return Issue("model-field-too-large", name, f"must be at most {exact(self.maximum)}", value)
        if self.below is not None and isinstance(value, int | float) and not value < self.below:
            return Issue("model-field-not-below", name, f"must be less than {exact(self.below)}", value)
        if self.choices and value not in self.choices:
            return Issue(
                "activation-unknown", name, "is not an activation function", value, f"Known: {', '.join(self.choices)}"
            )
        return None

    def describe(self) -> str:
        """The accepted types in words."""
        kinds = [_KINDS[kind] for kind in self.types if kind is not int or float not in self.types]
        return " or ".join([*kinds, *(["null"] if self.optional else [])])


def size(
    default: int | None = None, *, optional: bool = False, safe: bool = False, maximum: float = Field.maximum
) -> Field:
    """A count of something, at least 1; without a default (and not optional) the config must state it."""
    return Field((int,), default, optional, default is None and not optional, safe, minimum=1, maximum=maximum)


def number(default: float, *, safe: bool = False, maximum: float = Field.maximum) -> Field:
    """A float that is not negative."""
    return Field((int, float), default, safe=safe, minimum=0, maximum=maximum)


def dropout() -> Field:
    """A probability with which values are left out; 1 would leave nothing."""
    return Field((int, float), 0.0, safe=True, minimum=0, below=1)


def activation(default: str) -> Field:
    """The name of an activation function."""
    return Field((str,), default, choices=ACTIVATIONS)


def switch(default: bool, *, safe: bool = False) -> Field:
    """True or false."""
    return Field((bool,), default, safe=safe)


def token(default: int | None = None, *, several: bool = False) -> Field:
    """A token id or null; ``several`` ids are a list."""
    return Field((int, list) if several else (int,), default, optional=True, safe=True, minimum=0)


COMMON_FIELDS: Mapping[str, Field] = {
    # Of a single token nothing can be learned: it is the only one there is to predict.
    "vocab_size": replace(size(), minimum=2),
    "hidden_size": size(),
    "intermediate_size": size(),
    "num_hidden_layers": size(maximum=2_000),
    "num_attention_heads": size(),
    "hidden_act": activation("silu"),
    "initializer_range": number(0.02, maximum=1),
    "use_cache": switch(True, safe=True),
    "tie_word_embeddings": switch(False),
    "attention_dropout": dropout(),
    "pad_token_id": token(),
}
"""Fields that the families of decoders share."""


class Family(ABC):
    """One architecture. Instances hold no state: every method is a pure function of a canonical config.

    A new family is one file: a subclass that names itself, lists its config fields and yields its tensors.
    """

    model_type: ClassVar[str]
    """``model_type`` of the Hugging Face config."""
    architecture: ClassVar[str]
    """Class of the causal language model in transformers."""
    decoder_layer_class: ClassVar[str]
    """Class of one decoder layer: the unit of sharding, activation checkpointing and compilation."""
    fields: ClassVar[Mapping[str, Field]]
    """Every config field except the position-embedding and number-format ones, which have two spellings."""
    default_rope_theta: ClassVar[float] = 10_000.0
    buffers: ClassVar[str] = r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
    """Pattern of names that older files hold beside the parameters and that the model computes itself."""
    flops_formula: ClassVar[str] = "6 x non-embedding parameters + 12 x layers x (heads x head_dim) x attention span"

    @abstractmethod
    def iterate_tensors(self, config: Config) -> Iterator[tuple[str, Tensor]]:
        """Names in published files with their tensors, in model order."""

    def tensors(self, config: Config) -> dict[str, Tensor]:
        """Every parameter in model order; a tied output head is absent, since it is the embedding."""
        return dict(self.iterate_tensors(config))

    def one_layer(self, config: Config) -> dict[str, Tensor]:
        """The parameters of the first decoder layer, names as in published files without the layer's prefix."""
        inside = {name.partition(".layers.0.")[2]: it for name, it in self.iterate_tensors(config)}
        return {name: it for name, it in inside.items() if name}

    def linear_layers(self, config: Config) -> dict[str, Tensor]:
        """The matrices of a decoder layer, [output, input], that are linear layers of transformers, by their names."""
        layer = self.one_layer(config)
        return {name.removesuffix(".weight"): it for name, it in layer.items() if it.group == "matrix"}

    def tied_head(self, config: Config) -> tuple[str, str] | None:
        """(output head, embedding) where the head is the embedding; None for a head of its own."""
        if not self.value(config, "tie_word_embeddings"):
            return None
        tied = self.tensors(config)
        # The head is the one tensor that the untied model has more.
        (head,) = self.tensors({**config, "tie_word_embeddings": False}).keys() - tied.keys()
        return head, next(name for name, tensor in tied.items() if tensor.group == "embedding")

    def packings(self, config: Config) -> dict[str, Packing]:
        """Parameters that transformers 5 names or keeps otherwise than published files do, by its name for them."""
        return {}

    def parameters(self, config: Config) -> dict[str, Tensor]:
        """Every parameter of the transformers 5 model, by its name for it, in the order of ``named_parameters()``."""
        tensors, packings = self.tensors(config), self.packings(config)
        holder = {part: name for name, it in packings.items() for parts in it.parts for part in parts}
        # A packed parameter stands where the first of its tensors does.
        names = dict.fromkeys(holder.get(name, name) for name in tensors)
        return {it: packings[it].tensor(tensors) if it in packings else tensors[it] for it in names}

    def one_spelling(self, config: Config) -> Config:
        """A config as it was read, with what only this family spells in several ways under one name."""
        return config

    def both_spellings(self, config: Config) -> dict[str, Any]:
        """Fields of a canonical config as only this family's transformers classes spell them."""
        return {}

    def value(self, config: Config, name: str) -> Any:
        """A config field, or its default."""
        return config[name] if name in config else self.fields[name].default

    def parameter_count(self, config: Config) -> int:
        """Number of parameters; tied embeddings count once."""
        return sum(tensor.size for tensor in self.tensors(config).values())

    def non_embedding_parameter_count(self, config: Config) -> int:
        """Parameters that take part in a token's arithmetic: all but the embedding table.

        A tied table is counted, because the output head multiplies by it.
        """
        table = 0 if self.value(config, "tie_word_embeddings") else self.vocab_size(config) * int(config["hidden_size"])
        return self.parameter_count(config) - table

    def active_parameter_count(self, config: Config) -> int:
        """Parameters that take part in one token's arithmetic."""
        return self.non_embedding_parameter_count(config)

    def flops_per_token(self, config: Config, seq_length: int) -> float:
        """Floating-point operations of one token's forward and backward pass, by ``flops_formula``.

        6 per weight: a multiply-add, once forward and twice backward (Kaplan et al. 2020, section 2.1). 12 per
        attention score and channel (PaLM, Chowdhery et al. 2022, appendix B), causality not deducted, as published
        model FLOPs utilisations have it. ``seq_length`` in tokens; recomputed activations do not count.
        """
        # Not hidden_size: a config may state a head size of its own.
        channels = int(config["num_attention_heads"]) * self.head_dim(config)
        attention = 12 * int(config["num_hidden_layers"]) * channels * self.attention_span(config, seq_length)
        return float(6 * self.active_parameter_count(config) + attention)

    @abstractmethod
    def layer_widths(self, config: Config) -> LayerWidths:
        """What one decoder layer keeps for its backward pass."""

    def attention_span(self, config: Config, seq_length: int) -> int:
        """Tokens a token can attend to, causality aside: ``seq_length``, or a sliding window if that is shorter."""
        return seq_length

    def head_dim(self, config: Config) -> int:
        """Channels of one attention head."""
        return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])

    def vocab_size(self, config: Config) -> int:
        """Rows of the token table."""
        return int(config["vocab_size"])

    def max_position_embeddings(self, config: Config) -> int:
        """The longest sequence the model is made for, in tokens."""
        return int(self.value(config, "max_position_embeddings"))

    def field_issues(self, config: Config) -> list[Issue]:
        """Missing, mistyped and out-of-range fields of any config; paths are bare field names."""
        missing = [name for name, field in self.fields.items() if field.required and name not in config]
        wrong = [field.issue(name, config[name]) for name, field in self.fields.items() if name in config]
        return [
            *(Issue("model-field-missing", name, "is missing from the config") for name in missing),
            *(f for f in wrong if f),
        ]

    def canonical_fields(self, config: Config) -> dict[str, Any]:
        """All fields with defaults filled in, floats as floats; for a config without ``field_issues``."""
        return {name: _tidy(self.value(config, name), field) for name, field in self.fields.items()}

    def in_effect(self, config: Config, name: str) -> Any:
        """The value of any field for a canonical config, of one that ``canonical_fields`` leaves out, too.

        A name that the family does not know has none.
        """
        return self.value(config, name) if name in self.fields else config.get(name)

    def check(self, config: Config) -> list[Issue]:
        """What is wrong with a canonical config as a whole; paths are bare field names."""
        return []


def _tidy(value: Any, field: Field) -> Any:
    # 1e6 and 1000000 in two configs must give one canonical config, and one digest.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_number and float in field.types else value
