"""Parts of a training task: model, data, optimiser, where it starts, checkpoints, logging and its watchdog."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from sm_llm.spec.base import Output, Pattern, Source, SpecModel
from sm_llm.spec.field_classes import DATA, LENGTH, MODEL, OPTIMISER, ORDER, SCHEDULE, VALIDATION


class ModelSpec(SpecModel):
    """The architecture. Exactly one of ``preset`` and ``path``, unless ``start.pretrained`` brings it."""

    preset: Annotated[str | None, MODEL] = None
    """Name of a built-in architecture for training from scratch, e.g. ``llama-3.2-1b`` (``sm_llm.models.presets``)."""
    path: Annotated[Source | None, MODEL] = None
    """Folder or hub id whose ``config.json`` describes the model."""
    config: Annotated[dict[str, Any], MODEL] = Field(default_factory=dict)
    """Overrides of single config fields. From scratch any field; with pretrained weights only the safe ones."""


class _Data(SpecModel):
    seq_length: Annotated[int, ORDER] = Field(ge=2, le=2**24)
    """Tokens per row."""
    shuffle: Annotated[bool, ORDER] = True
    """Visit rows in an order that is a pure function of (seed, epoch, global sample index)."""


class RowsData(_Data):
    """Packed rows as written by the ``prepare`` task (readable by ``datasets.load_from_disk``)."""

    format: Annotated[Literal["rows"], ORDER] = "rows"
    """The format of the data."""
    train: Annotated[Source, DATA]
    """Folder of training rows."""
    validation: Annotated[Source | None, VALIDATION] = None
    """Folder of validation rows; null trains without validation."""


class JsonRowsData(_Data):
    """Rows of the AWS examples: ``.json`` / ``.json.gz`` line files with ``input_ids`` and ``attention_mask``."""

    format: Annotated[Literal["json_rows"], ORDER] = "json_rows"
    """The format of the data."""
    train: Annotated[Source, DATA]
    """Folder of training files."""
    validation: Annotated[Source | None, VALIDATION] = None
    """Folder of validation files; null trains without validation."""


class SyntheticData(_Data):
    """Random tokens drawn from the model's vocabulary: for benchmarks and smoke tests."""

    format: Annotated[Literal["synthetic"], ORDER] = "synthetic"
    """The format of the data."""
    rows: Annotated[int, ORDER] = Field(default=100_000, ge=1, le=10**12)
    """Training rows in an epoch."""
    validation_rows: Annotated[int, SCHEDULE] = Field(default=0, ge=0, le=10**12)
    """Validation rows; 0 trains without validation."""


STREAM_BUILDERS = ("arrow", "csv", "json", "pandas", "parquet", "text", "webdataset", "xml")
"""Names of the builders of ``datasets`` that read files of text, as ``StreamData.dataset``."""


class StreamData(_Data):
    """A Hugging Face dataset streamed and tokenised on the fly (C4 style), disjoint per data-parallel rank."""

    format: Annotated[Literal["stream"], ORDER] = "stream"
    """The format of the data."""
    dataset: Annotated[str, ORDER]
    """``hf://datasets/org/name@revision`` (pinned when the run first reads it), a plain hub id, or the builder's name
    (``json``, ``parquet``, ``text``) when ``data_files`` are given."""
    config_name: Annotated[str | None, ORDER] = None
    """Configuration of the dataset, e.g. ``en`` of C4."""
    data_files: Annotated[Pattern | list[Pattern] | None, ORDER] = None
    """Files for a builder, as patterns or URLs."""
    split: Annotated[str, ORDER] = "train"
    """Split to train on."""
    validation_split: Annotated[str | None, SCHEDULE] = None
    """Split to validate on; null trains without validation."""
    validation_rows: Annotated[int, SCHEDULE] = Field(default=256, ge=1, le=10**12)
    """Rows taken from the start of the validation split."""
    text_field: Annotated[str, ORDER] = "text"
    """Field that holds the text."""
    shuffle_buffer: Annotated[int, ORDER] = Field(default=10_000, ge=0, le=10**9)
    """Documents held in memory to shuffle from; 0 keeps their order."""


DataSpec = Annotated[RowsData | JsonRowsData | SyntheticData | StreamData, Field(discriminator="format")]


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


class CheckpointSpec(SpecModel):
    """The checkpoint policy. A checkpoint exists only once its commit does."""

    every_steps: int | None = Field(default=None, ge=1, le=10**12)
    """Save every n steps; null derives about ten checkpoints a run."""
    keep_last: int = Field(default=3, ge=1, le=1_000_000)
    """Keep the newest n commits."""
    keep_every_steps: int | None = Field(default=None, ge=1, le=10**12)
    """Also keep every commit whose step is a multiple of this."""
    async_save: bool = True
    """Write and publish in the background; false waits for each, at most ``max_blocking_seconds``. Strategy nxd always
    waits until the node's disk has a save."""
    max_blocking_seconds: float = Field(default=60.0, gt=0, le=2_419_200)
    """While earlier saves are being written to the local disk, wait at most this long for memory to copy to; then skip
    the new save with a warning."""
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


class NotFiniteSpec(SpecModel):
    """The update of such a step is never applied, whatever the policy, so the trained state stays finite.

    A step whose global batch has no label to learn from is one of them: ``stop`` fails, the others skip it.
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """``stop`` fails the job; ``skip`` continues with the next step; ``rollback`` goes back to the newest checkpoint,
    repeats the steps since, and skips the step if it is not finite again."""
    limit: int = Field(default=10, ge=1, le=10**12)
    """skip: fail at so many such steps in a row; rollback: fail when it would be one more than so many times."""


class ProfileSpec(SpecModel):
    """Traces of torch's profiler, published in the run's folder as ``profiles/attempt-<n>/…json.gz``."""

    every_steps: int = Field(ge=1, le=10**12)
    """Take a trace every n steps."""
    steps: int = Field(default=1, ge=1, le=10_000)
    """Steps in one trace, from the n-th on; at most ``every_steps``."""
    all_processes: bool = False
    """Trace every process, not the first alone: large, and it slows all of them."""


class TensorBoardSpec(SpecModel):
    """Event files for TensorBoard; all attempts of a run share one folder."""

    folder: Output | None = None
    """A folder below which the run gets one of its own; null means ``tensorboard`` in the run's folder."""


class MlflowSpec(SpecModel):
    """An MLflow run; all attempts continue the same one."""

    tracking_uri: Output | None = None
    """The tracking server; null leaves it to MLFLOW_TRACKING_URI."""
    experiment: str | None = None
    """The experiment; null means the job's name."""


class WandbSpec(SpecModel):
    """A Weights & Biases run; all attempts continue the same one."""

    project: str = Field(min_length=1)
    """The project."""
    entity: str | None = None
    """The user or team that owns the project; null leaves it to the account."""
    mode: Literal["online", "offline"] | None = None
    """``offline`` writes below the run's folder for a later ``wandb sync``; null leaves it to WANDB_MODE."""


class TrackersSpec(SpecModel):
    """Experiment trackers fed from the event log by the first process. One that fails never stops the training."""

    tensorboard: TensorBoardSpec | None = None
    """Write for TensorBoard; ``{}`` takes its defaults."""
    mlflow: MlflowSpec | None = None
    """Write to MLflow; ``{}`` takes its defaults."""
    wandb: WandbSpec | None = None
    """Write to Weights & Biases."""


class WatchdogSpec(SpecModel):
    """A stalled job logs where all its processes are, and ends."""

    enabled: bool = True
    """Off: a stalled job runs on, e.g. under a debugger."""
    stall_factor: float = Field(default=20.0, ge=2, le=1e6)
    """No step for this many times the median step time is a stall ..."""
    stall_seconds: float = Field(default=120.0, gt=0, le=2_419_200)
    """... but never sooner than this; also how long a process may give no sign of life at all."""
    start_seconds: float = Field(default=1800.0, gt=0, le=2_419_200)
    """How long the first steps may take, before their usual time is known."""
