"""The Qwen3 family (dense): Qwen2 with normalised queries and keys, and without its biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sm_llm.models.families.family import Config, Field, size, switch
from sm_llm.models.families.qwen2 import Qwen2

if TYPE_CHECKING:
    from collections.abc import Mapping


class Qwen3(Qwen2):
    """``Qwen3ForCausalLM``. transformers 4.44 does not know it."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    decoder_layer_class: ClassVar[str] = "Qwen3DecoderLayer"
    head_norms: ClassVar[tuple[str, ...]] = ("q_norm", "k_norm")
    fields: ClassVar[Mapping[str, Field]] = {
        **Qwen2.fields,
        "head_dim": size(128),
        "attention_bias": switch(False),
    }

    def has_bias(self, config: Config, projection: str) -> bool:
        return bool(self.value(config, "attention_bias")) and projection in ("q_proj", "k_proj", "v_proj", "o_proj")

    def head_dim(self, config: Config) -> int:
        return int(self.value(config, "head_dim"))

    def canonical_fields(self, config: Config) -> dict[str, Any]:
        """As ``Qwen2``; ``head_dim`` always, since its default does not follow from the width."""
        # ``GatedDecoder`` leaves the field out where it equals the width divided by the heads.
        return {**super().canonical_fields(config), "head_dim": self.head_dim(config)}
