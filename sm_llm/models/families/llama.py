"""The Llama family (Llama 2, 3, 3.1, 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sm_llm.models.families.family import Config, Field, size, switch
from sm_llm.models.families.gated import GATED_FIELDS, GatedDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping


class Llama(GatedDecoder):
    """``LlamaForCausalLM``."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    decoder_layer_class: ClassVar[str] = "LlamaDecoderLayer"
    fields: ClassVar[Mapping[str, Field]] = {
        **GATED_FIELDS,
        "max_position_embeddings": size(2048, safe=True),
        "attention_bias": switch(False),
        "mlp_bias": switch(False),
        "pretraining_tp": size(1, optional=True),
    }

    def has_bias(self, config: Config, projection: str) -> bool:
        field = "attention_bias" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp_bias"
        return bool(self.value(config, field))
