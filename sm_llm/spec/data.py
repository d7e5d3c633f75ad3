"""Where training rows come from; one class per format."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sm_llm.spec.base import Source, SpecModel
from sm_llm.spec.comparison.classes import DATA, ORDER, SCHEDULE, VALIDATION


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


class StreamData(_Data):
    """A Hugging Face dataset streamed and tokenised on the fly (C4 style), disjoint per data-parallel rank."""

    format: Annotated[Literal["stream"], ORDER] = "stream"
    """The format of the data."""
    dataset: Annotated[str, ORDER]
    """``hf://datasets/org/name@revision`` (pinned when the run first reads it), a plain hub id, or the builder's name
    (``json``, ``parquet``, ``text``) when ``data_files`` are given."""
    config_name: Annotated[str | None, ORDER] = None
    """Configuration of the dataset, e.g. ``en`` of C4."""
    data_files: Annotated[str | list[str] | None, ORDER] = None
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
