"""Finds the family of a config by its ``model_type``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue, SpecError
from sm_llm.models.families.gpt_neox import GptNeoX
from sm_llm.models.families.llama import Llama
from sm_llm.models.families.mistral import Mistral
from sm_llm.models.families.mixtral import Mixtral
from sm_llm.models.families.qwen2 import Qwen2
from sm_llm.models.families.qwen3 import Qwen3

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config, Family

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (Llama(), Mistral(), Mixtral(), Qwen2(), Qwen3(), GptNeoX())
}


def family(config: Config) -> Family:
    """The family that ``config["model_type"]`` names; raises ``SpecError`` with the list of known ones."""
    model_type = config.get("model_type")
    found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        remedy = f"Supported: {', '.join(sorted(FAMILIES))}."
        raise SpecError(
            [
                Issue(
                    "model-family-unsupported",
                    "task.model",
                    "model_type is not a supported model family",
                    model_type,
                    remedy,
                )
            ]
        )
    return found
