"""What Llama and its kin share: rotary positions, RMSNorm, gated MLP, grouped-query attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sm_llm.errors import Issue
from sm_llm.models.families.family import COMMON_FIELDS, Config, Family, Field, LayerWidths, Tensor, number, size, token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


GATED_FIELDS: Mapping[str, Field] = {
    **COMMON_FIELDS,
    "num_key_value_heads": size(optional=True),
    "head_dim": size(optional=True),
    "rms_norm_eps": number(1e-6, maximum=1),
    "bos_token_id": token(1),
    "eos_token_id": token(2, several=True),
}
"""Config fields that all of them have; ``max_position_embeddings`` has another default in each."""


class GatedDecoder(Family):
    """Names and shapes as in ``LlamaForCausalLM``; weights are drawn from N(0, initializer_range), biases are zero,
    norms are one (``PreTrainedModel._init_weights`` of transformers)."""

    head_norms: ClassVar[tuple[str, ...]] = ()
    """RMSNorms over the channels of a head."""

    def has_bias(self, config: Config, projection: str) -> bool:
        """Whether ``q_proj`` … ``down_proj`` carries a bias."""
        return False

    def kv_heads(self, config: Config) -> int:
        """Key and value heads; as many as query heads when the config does not have it."""
        return int(self.value(config, "num_key_value_heads") or config["num_attention_heads"])

    def iterate_tensors(self, config: Config) -> Iterator[tuple[str, Tensor]]:
        hidden, vocab = int(config["hidden_size"]), self.vocab_size(config)
        std = float(self.value(config, "initializer_range"))
        # The row of the padding token starts at zero, as ``nn.Embedding`` has it.
        padding = self.value(config, "pad_token_id")
        yield "model.embed_tokens.weight", Tensor((vocab, hidden), "embedding", "normal", std, padding)
        for layer in range(int(config["num_hidden_layers"])):
            for name, tensor in self.layer_tensors(config, std):
                yield f"model.layers.{layer}.{name}", tensor
        yield "model.norm.weight", Tensor((hidden,), "norm", "ones")
        if not self.value(config, "tie_word_embeddings"):
            yield "lm_head.weight", Tensor((vocab, hidden), "embedding", "normal", std)

    def layer_tensors(self, config: Config, std: float) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one decoder layer, names without the layer's prefix."""
        for name, shape in self.attention_projections(config).items():
            yield from self.projection(config, f"self_attn.{name}", shape, std)
        for name in self.head_norms:
            yield f"self_attn.{name}.weight", Tensor((self.head_dim(config),), "norm", "ones")
        yield from self.mlp_tensors(config, std)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{norm}.weight", Tensor((int(config["hidden_size"]),), "norm", "ones")

    def mlp_tensors(self, config: Config, std: float) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one layer's feed-forward block."""
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for name, shape in shapes.items():
            yield from self.projection(config, f"mlp.{name}", shape, std)

    def projection(self, config: Config, name: str, shape: tuple[int, int], std: float) -> Iterator[tuple[str, Tensor]]:
        """One matrix, [output, input] as PyTorch stores it, and its bias if it has one."""
        yield f"{name}.weight", Tensor(shape, "matrix", "normal", std)
        if self.has_bias(config, name.rpartition(".")[2]):
            yield f"{name}.bias", Tensor(shape[:1], "bias", "zeros")

    def attention_projections(self, config: Config) -> dict[str, tuple[int, int]]:
        """Shapes of the attention's matrices by name."""
        hidden = int(config["hidden_size"])
        queries = int(config["num_attention_heads"]) * self.head_dim(config)
        keys = self.kv_heads(config) * self.head_dim(config)
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
        }

    def layer_widths(self, config: Config) -> LayerWidths:
        """Queries, keys and values, attention's result; gate, its activation, up, and their product.

        Each of two norms keeps its input in fp32 and what it has normalised, and those over heads likewise.
        """
        hidden, inner = int(config["hidden_size"]), self.inner_channels(config)
        queries = int(config["num_attention_heads"]) * self.head_dim(config)
        keys = self.kv_heads(config) * self.head_dim(config)
        normed = 3 * (queries + keys) if self.head_norms else 0  # an fp32 element counts as two
        return LayerWidths(
            hidden=hidden,
            in_fp32=2 * hidden,
            around=2 * hidden,
            inputs=2 * hidden,
            inside=2 * queries + 2 * keys + normed + 4 * inner,
            products=2 * queries + keys + inner,
            compiled=4 * hidden + 2 * queries + 2 * keys + (queries + keys if self.head_norms else 0) + 3 * inner,
            cheap={
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): hidden,
                ("mlp.gate_proj", "mlp.up_proj"): hidden,
                ("mlp.down_proj",): inner,
            },
            products_around=hidden,
        )

    def inner_channels(self, config: Config) -> int:
        """Inner channels of the feed-forward block that one token goes through."""
        return int(config["intermediate_size"])

    def canonical_fields(self, config: Config) -> dict[str, Any]:
        """As ``Family``; ``head_dim`` only where it is not hidden_size / num_attention_heads.

        transformers 4.44 does not know the field in Llama, and a copy of it would go stale when the width is changed.
        """
        fields = super().canonical_fields(config)
        fields["num_key_value_heads"] = self.kv_heads(config)
        # The default of a family without a field of its own.
        if fields.get("head_dim") in (None, fields["hidden_size"] // fields["num_attention_heads"]):
            fields.pop("head_dim", None)
        return fields

    def in_effect(self, config: Config, name: str) -> Any:
        return self.head_dim(config) if name == "head_dim" else super().in_effect(config, name)

    def check(self, config: Config) -> list[Issue]:
        return [*self._check_heads(config), *self._check_padding(config)]

    def _check_heads(self, config: Config) -> list[Issue]:
        hidden, heads, keys = (config[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        issues = []
        # With a head size of its own the heads need not divide the width.
        if "head_dim" not in config and hidden % heads:
            issues.append(
                Issue(
                    "heads-do-not-divide-hidden-size",
                    "hidden_size",
                    f"must be a multiple of num_attention_heads ({heads})",
                    hidden,
                )
            )
        if heads % keys:
            issues.append(
                Issue(
                    "key-value-heads-do-not-divide-heads",
                    "num_attention_heads",
                    f"must be a multiple of num_key_value_heads ({keys})",
                    heads,
                )
            )
        # Rotary positions turn pairs of channels.
        if self.head_dim(config) % 2:
            issues.append(
                Issue("head-size-odd", "head_dim", "rotary positions need an even head size", self.head_dim(config))
            )
        return issues

    def _check_padding(self, config: Config) -> list[Issue]:
        padding, vocab = config["pad_token_id"], config["vocab_size"]
        if padding is None or padding < vocab:
            return []
        return [
            Issue(
                "padding-id-beyond-vocabulary",
                "pad_token_id",
                f"must be null or an id below vocab_size ({vocab})",
                padding,
            )
        ]
