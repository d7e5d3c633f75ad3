"""The Mixtral family (Mixtral 8x7B, 8x22B): Mistral with a mixture of experts as its feed-forward block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from sm_llm.errors import Issue
from sm_llm.models.families.family import Config, Field, LayerWidths, Packing, Tensor, number, size, switch
from sm_llm.models.families.gated import GATED_FIELDS
from sm_llm.models.families.mistral import Mistral

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_EXPERTS = "block_sparse_moe.experts"


class Mixtral(Mistral):
    """``MixtralForCausalLM``, its tensors named as in the published files; transformers 5 keeps all experts in one.

    Training does not add the router's balancing loss, as transformers does not unless asked for router logits.
    """

    model_type: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    decoder_layer_class: ClassVar[str] = "MixtralDecoderLayer"
    default_rope_theta: ClassVar[float] = 1_000_000.0
    flops_formula: ClassVar[str] = (
        "6 x non-embedding parameters of a token's experts + 12 x layers x (heads x head_dim) x attention span"
    )
    fields: ClassVar[Mapping[str, Field]] = {
        **GATED_FIELDS,
        "rms_norm_eps": number(1e-5, maximum=1),
        "max_position_embeddings": size(131_072, safe=True),
        "num_key_value_heads": size(8, optional=True),
        "sliding_window": size(optional=True),
        "num_experts_per_tok": size(2),
        "num_local_experts": size(8, maximum=1_000),
        "output_router_logits": switch(False),
        "router_aux_loss_coef": number(0.001),
        "router_jitter_noise": number(0.0, maximum=1),
    }

    def mlp_tensors(self, config: Config, std: float) -> Iterator[tuple[str, Tensor]]:
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        experts = self.experts(config)
        yield "block_sparse_moe.gate.weight", Tensor((experts, hidden), "matrix", "normal", std)
        for expert in range(experts):
            for name, shape in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
                yield f"{_EXPERTS}.{expert}.{name}.weight", Tensor(shape, "matrix", "normal", std)

    def linear_layers(self, config: Config) -> dict[str, Tensor]:
        """As in all families, without the router and the experts: both have parameters of their own."""
        found = super().linear_layers(config)
        return {name: it for name, it in found.items() if not name.startswith("block_sparse_moe.")}

    def inner_channels(self, config: Config) -> int:
        return int(self.value(config, "num_experts_per_tok")) * int(config["intermediate_size"])

    def layer_widths(self, config: Config) -> LayerWidths:
        """As Mistral's; each chosen expert has a copy of the token, and gives one back.

        The products of experts are done in groups, which selective checkpointing computes again.
        """
        widths, inner = super().layer_widths(config), self.inner_channels(config)
        copies = 2 * int(self.value(config, "num_experts_per_tok")) * widths.hidden
        products = widths.products - inner
        # Products in groups are no part of a compiled graph: their inputs and results are all kept.
        compiled = widths.compiled + copies + inner
        around = widths.around + copies
        return replace(widths, around=around, products=products, products_around=0, compiled=compiled)

    def experts(self, config: Config) -> int:
        """Experts of one layer."""
        return int(self.value(config, "num_local_experts"))

    def packings(self, config: Config) -> dict[str, Packing]:
        found = {}
        for layer in range(int(config["num_hidden_layers"])):
            prefix = f"model.layers.{layer}"
            experts = [f"{prefix}.{_EXPERTS}.{expert}" for expert in range(self.experts(config))]
            found[f"{prefix}.mlp.gate.weight"] = Packing(((f"{prefix}.block_sparse_moe.gate.weight",),))
            # w1 is the gate and w3 the up projection: transformers 5 joins them in this order.
            halves = tuple((f"{expert}.w1.weight", f"{expert}.w3.weight") for expert in experts)
            found[f"{prefix}.mlp.experts.gate_up_proj"] = Packing(halves, stacked=True)
            downs = tuple((f"{expert}.w2.weight",) for expert in experts)
            found[f"{prefix}.mlp.experts.down_proj"] = Packing(downs, stacked=True)
        return found

    def active_parameter_count(self, config: Config) -> int:
        """As in all families, without the experts that a token does not visit."""
        idle = self.experts(config) - int(self.value(config, "num_experts_per_tok"))
        # An expert has three matrices.
        expert = 3 * int(config["hidden_size"]) * int(config["intermediate_size"])
        return self.non_embedding_parameter_count(config) - int(config["num_hidden_layers"]) * idle * expert

    def check(self, config: Config) -> list[Issue]:
        chosen, experts = config["num_experts_per_tok"], config["num_local_experts"]
        if chosen <= experts:
            return super().check(config)
        issue = Issue(
            "experts-per-token-too-many",
            "num_experts_per_tok",
            f"must be at most num_local_experts ({experts})",
            chosen,
        )
        return [*super().check(config), issue]
