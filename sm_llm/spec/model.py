"""Which model is trained: a Hugging Face config by folder or id, or a from-scratch preset."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sm_llm.spec.base import Source, SpecModel
from sm_llm.spec.comparison.classes import MODEL


class ModelSpec(SpecModel):
    """The architecture. Exactly one of ``preset`` and ``path``, unless ``start.pretrained`` brings it."""

    preset: Annotated[str | None, MODEL] = None
    """Name of a built-in architecture for training from scratch, e.g. ``llama-3.2-1b`` (``sm_llm.models.presets``)."""
    path: Annotated[Source | None, MODEL] = None
    """Folder or hub id whose ``config.json`` describes the model."""
    config: Annotated[dict[str, Any], MODEL] = Field(default_factory=dict)
    """Overrides of single config fields. From scratch any field; with pretrained weights only the safe ones."""
