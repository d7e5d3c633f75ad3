"""The Mistral family (Mistral 7B and its kin): Llama without biases, attention in a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sm_llm.models.families.family import Config, Field, size
from sm_llm.models.families.gated import GATED_FIELDS, GatedDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping


class Mistral(GatedDecoder):
    """``MistralForCausalLM``."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    decoder_layer_class: ClassVar[str] = "MistralDecoderLayer"
    fields: ClassVar[Mapping[str, Field]] = {
        **GATED_FIELDS,
        "max_position_embeddings": size(131_072, safe=True),
        "num_key_value_heads": size(8, optional=True),
        "sliding_window": size(4096, optional=True),
    }

    def attention_span(self, config: Config, seq_length: int) -> int:
        window = self.value(config, "sliding_window")
        # Beyond its window a token is masked, so those scores are not counted as work.
        return seq_length if window is None else min(seq_length, int(window))
