"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.comparison.classes import LENGTH, OPTIMISER, SCHEDULE

Schedule = Literal["cosine", "linear", "constant", "wsd", "exponential", "plateau"]


class OptimSpec(SpecModel):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019) and a schedule over optimiser steps 1..N."""

    name: Annotated[Literal["adamw"], OPTIMISER] = "adamw"
    """The optimiser."""
    learning_rate: Annotated[float, SCHEDULE] = Field(default=3e-4, gt=0, le=1)
    """Peak learning rate. AdamW moves a weight by about this much in a step."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of the first and second moment; each at least 0 and below 1."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the denominator of the update."""
    weight_decay: float = Field(default=0.1, ge=0, le=100)
    """Applied to matrices only; norms and biases are never decayed."""
    decay_embeddings: bool = True
    """Whether token embeddings (and an untied output head) are decayed."""
    max_grad_norm: float | None = Field(default=1.0, gt=0, le=1e9)
    """Clip the global gradient norm to this; null switches clipping off."""
    schedule: Annotated[Schedule, SCHEDULE] = "cosine"
    """Course of the learning rate after the warm-up."""
    warmup_steps: Annotated[int | None, LENGTH] = Field(default=None, ge=0, le=10**12)
    """Linear warm-up in steps. The first step's rate is peak/warmup_steps, never zero."""
    warmup_fraction: Annotated[float | None, LENGTH] = Field(default=None, ge=0, lt=1)
    """Linear warm-up as a fraction of the schedule's steps; give this or ``warmup_steps``."""
    schedule_steps: Annotated[int | None, LENGTH] = Field(default=None, ge=1, le=10**12)
    """Steps that the schedule spans, from the first on; null spans the training. Afterwards the rate stays. State it to
    continue a checkpoint over another number of steps: the old number keeps the course, another one changes it."""
    min_learning_rate: Annotated[float, SCHEDULE] = Field(default=0.0, ge=0, le=1)
    """Floor, reached at the schedule's last step (cosine, linear, wsd, exponential) or never undercut (plateau)."""
    decay_fraction: Annotated[float, SCHEDULE] = Field(default=0.2, gt=0, le=1)
    """wsd only: the last fraction of the schedule's steps, in which the rate falls linearly to the floor."""
    plateau_factor: Annotated[float, SCHEDULE] = Field(default=0.5, gt=0, lt=1)
    """plateau only: multiply the rate by this when validation loss stops falling."""
    plateau_patience: Annotated[int, SCHEDULE] = Field(default=3, ge=0, le=10**12)
    """plateau only: validations without a new best before the rate falls."""
