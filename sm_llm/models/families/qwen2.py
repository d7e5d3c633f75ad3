"""The Qwen2 family (Qwen2, Qwen2.5): Llama's tensors with biases on queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sm_llm.errors import Issue
from sm_llm.models.families.family import Config, Field, size, switch, token
from sm_llm.models.families.gated import GATED_FIELDS, GatedDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping


class Qwen2(GatedDecoder):
    """``Qwen2ForCausalLM``. Sliding-window layers are refused: no published model uses them."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    decoder_layer_class: ClassVar[str] = "Qwen2DecoderLayer"
    fields: ClassVar[Mapping[str, Field]] = {
        **GATED_FIELDS,
        "max_position_embeddings": size(32_768, safe=True),
        "num_key_value_heads": size(32, optional=True),
        "bos_token_id": token(),
        "eos_token_id": token(several=True),
        "use_sliding_window": switch(False),
        "sliding_window": size(4096, optional=True),
        "max_window_layers": size(28),
        "layer_types": Field((list,), None, optional=True),
    }

    def has_bias(self, config: Config, projection: str) -> bool:
        return projection in ("q_proj", "k_proj", "v_proj")

    def canonical_fields(self, config: Config) -> dict[str, Any]:
        """As all; a window that is not used is null, and ``layer_types`` (5.x only) goes when it adds nothing."""
        fields = super().canonical_fields(config)
        fields["sliding_window"] = fields["sliding_window"] if fields["use_sliding_window"] else None
        if set(fields["layer_types"] or ()) <= {"full_attention"}:
            del fields["layer_types"]
        return fields

    def check(self, config: Config) -> list[Issue]:
        issues = super().check(config)
        if config["use_sliding_window"] or "layer_types" in config:
            name = "use_sliding_window" if config["use_sliding_window"] else "layer_types"
            issues.append(
                Issue(
                    "sliding-window-unsupported",
                    name,
                    f"sliding-window layers are not supported for {self.model_type}",
                    config[name],
                )
            )
        return issues
