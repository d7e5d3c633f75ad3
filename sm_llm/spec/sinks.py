"""Where a training run's numbers are shown beside the run's own event log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel


class TensorBoardSink(SpecModel):
    """Event files for TensorBoard; all attempts of a run share one folder."""

    folder: str | None = None
    """A folder below which the run gets one of its own; null means ``tensorboard`` in the run's folder."""


class MlflowSink(SpecModel):
    """An MLflow run; all attempts continue the same one."""

    tracking_uri: str | None = None
    """The tracking server; null leaves it to MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """The experiment; null means the job's name."""


class WandbSink(SpecModel):
    """A Weights & Biases run; all attempts continue the same one."""

    project: str = Field(min_length=1)
    """The project."""
    entity: str | None = None
    """The user or team that owns the project; null leaves it to the account."""
    mode: Literal["online", "offline"] | None = None
    """``offline`` writes below the run's folder for a later ``wandb sync``; null leaves it to WANDB_MODE."""


class SinksSpec(SpecModel):
    """Experiment trackers fed from the event log by the first process. One that fails never stops the training."""

    tensorboard: TensorBoardSink | None = None
    """Write for TensorBoard; ``{}`` takes its defaults."""
    mlflow: MlflowSink | None = None
    """Write to MLflow; ``{}`` takes its defaults."""
    wandb: WandbSink | None = None
    """Write to Weights & Biases."""
