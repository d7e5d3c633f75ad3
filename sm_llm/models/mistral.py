"""The Mistral family (Mistral 7B and its kin): Llama's tensors without biases, attention in a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sm_llm.models.family import Config, Field, size
from sm_llm.models.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_IN_MISTRAL = ("attention_bias", "mlp_bias", "pretraining_tp")


class Mistral(Llama):
    """Names and shapes of ``MistralForCausalLM``."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    decoder_layer_class: ClassVar[str] = "MistralDecoderLayer"
    fields: ClassVar[Mapping[str, Field]] = {
        **{name: field for name, field in Llama.fields.items() if name not in _NOT_IN_MISTRAL},
        "max_position_embeddings": size(131_072, safe=True),
        "num_key_value_heads": size(8, optional=True),
        "sliding_window": size(4096, optional=True),
    }

    def has_bias(self, config: Config, projection: str) -> bool:
        return False

    def attention_span(self, config: Config, seq_length: int) -> int:
        window = self.value(config, "sliding_window")
        return seq_length if window is None else min(seq_length, int(window))
