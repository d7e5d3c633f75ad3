"""Where training rows come from; one class per format."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sm_llm.spec.base import Source, SpecModel


class _Data(SpecModel):
    seq_length: int = Field(ge=2)
    """Tokens per row."""
    shuffle: bool = True
    """Visit rows in an order that is a pure function of (seed, epoch, global sample index)."""


class RowsData(_Data):
    """Packed rows as written by the ``prepare`` task (readable by ``datasets.load_from_disk``)."""

    format: Literal["rows"] = "rows"
    """The format of the data."""
    train: Source
    """Folder of training rows."""
    validation: Source | None = None
    """Folder of validation rows; null trains without validation."""


class JsonRowsData(_Data):
    """Rows of the AWS examples: ``.json`` / ``.json.gz`` line files with ``input_ids`` and ``attention_mask``."""

    format: Literal["json_rows"] = "json_rows"
    """The format of the data."""
    train: Source
    """Folder of training files."""
    validation: Source | None = None
    """Folder of validation files; null trains without validation."""


class SyntheticData(_Data):
    """Random tokens drawn from the model's vocabulary: for benchmarks and smoke tests."""

    format: Literal["synthetic"] = "synthetic"
    """The format of the data."""
    rows: int = Field(default=100_000, ge=1)
    """Training rows in an epoch."""
    validation_rows: int = Field(default=0, ge=0)
    """Validation rows; 0 trains without validation."""


class StreamData(_Data):
    """A Hugging Face dataset streamed and tokenised on the fly (C4 style), disjoint per data-parallel rank."""

    format: Literal["stream"] = "stream"
    """The format of the data."""
    dataset: str
    """``hf://datasets/org/name@revision`` (pinned when the run first reads it), a plain hub id, or the builder's name
    (``json``, ``parquet``, ``text``) when ``data_files`` are given."""
    config_name: str | None = None
    """Configuration of the dataset, e.g. ``en`` of C4."""
    data_files: str | list[str] | None = None
    """Files for a builder, as patterns or URLs."""
    split: str = "train"
    """Split to train on."""
    validation_split: str | None = None
    """Split to validate on; null trains without validation."""
    validation_rows: int = Field(default=256, ge=1)
    """Rows taken from the start of the validation split."""
    text_field: str = "text"
    """Field that holds the text."""
    shuffle_buffer: int = Field(default=10_000, ge=0)
    """Documents held in memory to shuffle from; 0 keeps their order."""


DataSpec = Annotated[RowsData | JsonRowsData | SyntheticData | StreamData, Field(discriminator="format")]
