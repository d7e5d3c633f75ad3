"""How often training state is saved, how much of it is kept, and where training starts."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.base import Source, SpecModel


class CheckpointSpec(SpecModel):
    """The checkpoint policy. A checkpoint exists only once its commit does."""

    every_steps: int | None = Field(default=None, ge=1, le=10**12)
    """Save every n steps; null derives about ten checkpoints a run."""
    keep_last: int = Field(default=3, ge=1, le=1_000_000)
    """Keep the newest n commits."""
    keep_every_steps: int | None = Field(default=None, ge=1, le=10**12)
    """Also keep every commit whose step is a multiple of this."""
    async_save: bool = True
    """Write and publish in the background; false waits for each, at most ``max_blocking_seconds``."""
    max_blocking_seconds: float = Field(default=60.0, gt=0, le=2_419_200)
    """Wait at most this long until an earlier save is on the local disk; then skip the new one with a warning."""
    max_unpublished_seconds: float = Field(default=7200.0, gt=0, le=2_419_200)
    """A slow or failing store does not stop training until a save has waited this long to be published; then fail."""

    verify_state: bool = False
    """Hash the live state of every process at each save, and once it is loaded again; stop if they differ."""


class PretrainedStart(SpecModel):
    """Start from the weights of a Hugging Face folder, with a fresh optimiser."""

    pretrained: Source
    """Folder or hub id of the weights."""


class CheckpointStart(SpecModel):
    """Continue from another run's checkpoint: ``RUN_URI`` (newest) or ``RUN_URI@step``."""

    checkpoint: Source
    """The run's folder, or ``RUN@step``."""
    allow_other_data: bool = False
    """Continue on other data, or in another order, than the checkpoint was trained on. Model, optimiser and step count
    continue; samples are taken from the new order's position of that step on. Without it a difference is refused."""
