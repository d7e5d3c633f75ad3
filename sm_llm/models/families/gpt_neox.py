"""The GPT-NeoX family (GPT-NeoX-20B, Pythia): LayerNorm, partly rotary positions, queries, keys and values in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sm_llm.errors import Issue
from sm_llm.models.families.family import (
    COMMON_FIELDS,
    Config,
    Family,
    Field,
    LayerWidths,
    Packing,
    Tensor,
    activation,
    dropout,
    number,
    size,
    switch,
    token,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MAPS = ("rope_scaling", "rope_parameters")
_PART = "partial_rotary_factor"
_WRITTEN_OUT = ("gelu_fast", "gelu_new")


class GptNeoX(Family):
    """``GPTNeoXForCausalLM``; weights are drawn from N(0, initializer_range), biases are zero, norms are one."""

    model_type: ClassVar[str] = "gpt_neox"
    architecture: ClassVar[str] = "GPTNeoXForCausalLM"
    decoder_layer_class: ClassVar[str] = "GPTNeoXLayer"
    buffers: ClassVar[str] = r"\.attention\.(bias|masked_bias|rotary_emb\.(inv_freq|cos_cached|sin_cached))$"
    fields: ClassVar[Mapping[str, Field]] = {
        **COMMON_FIELDS,
        "hidden_act": activation("gelu"),
        "max_position_embeddings": size(2048, safe=True),
        "layer_norm_eps": number(1e-5, maximum=1),
        "rotary_pct": number(0.25, maximum=1),
        "hidden_dropout": dropout(),
        "use_parallel_residual": switch(True),
        "attention_bias": switch(True),
        "bos_token_id": token(0),
        "eos_token_id": token(2, several=True),
    }

    def one_spelling(self, config: Config) -> Config:
        """``rotary_emb_base`` as rope_theta; transformers 5 keeps ``rotary_pct`` among the rotary parameters."""
        found = dict(config)
        if (theta := found.pop("rotary_emb_base", None)) is not None:
            # The newer name counts where a config has both.
            found.setdefault("rope_theta", theta)
        for name in _MAPS:
            if isinstance(found.get(name), dict) and _PART in found[name]:
                found["rotary_pct"] = found[name][_PART]
                found[name] = {key: value for key, value in found[name].items() if key != _PART}
        return found

    def both_spellings(self, config: Config) -> dict[str, Any]:
        rotary = {**config["rope_parameters"], _PART: config["rotary_pct"]}
        return {"rotary_emb_base": rotary["rope_theta"], "rope_parameters": rotary}

    def iterate_tensors(self, config: Config) -> Iterator[tuple[str, Tensor]]:
        hidden, vocab = int(config["hidden_size"]), self.vocab_size(config)
        table = Tensor((vocab, hidden), "embedding", "normal", float(self.value(config, "initializer_range")))
        yield "gpt_neox.embed_in.weight", table
        for layer in range(int(config["num_hidden_layers"])):
            for name, tensor in self.layer_tensors(config):
                yield f"gpt_neox.layers.{layer}.{name}", tensor
        yield from _norm("gpt_neox.final_layer_norm", hidden)
        if not self.value(config, "tie_word_embeddings"):
            yield "embed_out.weight", table

    def layer_tensors(self, config: Config) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one layer, names without the layer's prefix."""
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        std, has_bias = float(self.value(config, "initializer_range")), bool(self.value(config, "attention_bias"))
        yield from _norm("input_layernorm", hidden)
        yield from _norm("post_attention_layernorm", hidden)
        # One matrix for all three, head by head; the family has no grouped key and value heads.
        yield from _linear("attention.query_key_value", (3 * hidden, hidden), std, has_bias)
        yield from _linear("attention.dense", (hidden, hidden), std, has_bias)
        yield from _linear("mlp.dense_h_to_4h", (inner, hidden), std)
        yield from _linear("mlp.dense_4h_to_h", (hidden, inner), std)

    def layer_widths(self, config: Config) -> LayerWidths:
        """One product for queries, keys and values, turned copies of two, attention's result; inner channels.

        Its norms keep their one input. An activation that is written out as a formula keeps the result of each step.
        """
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        # In transformers these activations are formulas of single torch operations, each of which keeps its result.
        steps = 8 if self.value(config, "hidden_act") in _WRITTEN_OUT else 2
        return LayerWidths(
            hidden=hidden,
            in_fp32=0,
            around=hidden,
            inputs=2 * hidden,
            inside=7 * hidden + steps * inner,
            products=4 * hidden + inner,
            compiled=8 * hidden + 2 * inner,
            cheap={
                ("attention.query_key_value",): hidden,
                ("mlp.dense_h_to_4h",): hidden,
                ("mlp.dense_4h_to_h",): inner,
            },
        )

    def packings(self, config: Config) -> dict[str, Packing]:
        if self.value(config, "tie_word_embeddings"):
            return {}
        # transformers 5 calls the head otherwise than the published files; a tied head is no parameter of its own.
        return {"lm_head.weight": Packing((("embed_out.weight",),))}

    def check(self, config: Config) -> list[Issue]:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        # The head size, on which the next check depends, needs this division.
        if hidden % heads:
            return [
                Issue(
                    "neox-heads-do-not-divide-hidden-size",
                    "hidden_size",
                    f"must be a multiple of num_attention_heads ({heads})",
                    hidden,
                )
            ]
        # Rounded down, as in transformers.
        rotary = int(self.head_dim(config) * config["rotary_pct"])
        if rotary % 2:
            problem = f"makes {rotary} of {self.head_dim(config)} channels rotary, which must be even"
            return [Issue("rotary-channels-odd", "rotary_pct", problem, config["rotary_pct"])]
        return []


def _norm(name: str, channels: int) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", Tensor((channels,), "norm", "ones")
    yield f"{name}.bias", Tensor((channels,), "bias", "zeros")


def _linear(name: str, shape: tuple[int, int], std: float, has_bias: bool = True) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", Tensor(shape, "matrix", "normal", std)
    if has_bias:
        yield f"{name}.bias", Tensor(shape[:1], "bias", "zeros")
