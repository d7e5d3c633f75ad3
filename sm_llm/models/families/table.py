"""Finds the family of a config by its ``model_type``."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from sm_llm.errors import Issue, SpecError

if TYPE_CHECKING:
    from sm_llm.models.families.family import Config, Family

FAMILIES = {
    "llama": "llama:Llama",
    "mistral": "mistral:Mistral",
    "mixtral": "mixtral:Mixtral",
    "qwen2": "qwen2:Qwen2",
    "qwen3": "qwen3:Qwen3",
    "gpt_neox": "gpt_neox:GptNeoX",
}
"""``model_type`` -> module and class; a plan loads the one that its model is of."""


@cache
def known_family(model_type: str) -> Family | None:
    """The family of that ``model_type``; None where there is none."""
    row = FAMILIES.get(model_type)
    if row is None:
        return None
    module, _, name = row.partition(":")
    # Imported by name, so that a plan does not load the modules of all families.
    return cast("Family", getattr(import_module(f"sm_llm.models.families.{module}"), name)())


def family(config: Config) -> Family:
    """The family that ``config["model_type"]`` names; raises ``SpecError`` with the list of known ones."""
    model_type = config.get("model_type")
    found = known_family(model_type) if isinstance(model_type, str) else None
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
