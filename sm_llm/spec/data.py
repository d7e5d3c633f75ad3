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
    train: Source
    validation: Source | None = None


class JsonRowsData(_Data):
    """A folder of ``.json`` / ``.json.gz`` line files with ``input_ids`` and ``attention_mask`` (the AWS examples' rows)."""

    format: Literal["json_rows"] = "json_rows"
    train: Source
    validation: Source | None = None


class SyntheticData(_Data):
    """Random tokens drawn from the model's vocabulary: for benchmarks and smoke tests."""

    format: Literal["synthetic"] = "synthetic"
    rows: int = Field(default=100_000, ge=1)
    validation_rows: int = Field(default=0, ge=0)


class StreamData(_Data):
    """A Hugging Face dataset streamed and tokenised on the fly (C4 style), disjoint per data-parallel rank."""

    format: Literal["stream"] = "stream"
    dataset: str
    """Hub id, or the builder name (``json``, ``parquet``, ``text``) when ``data_files`` are given."""
    config_name: str | None = None
    data_files: str | list[str] | None = None
    split: str = "train"
    validation_split: str | None = None
    validation_rows: int = Field(default=256, ge=1)
    text_field: str = "text"
    shuffle_buffer: int = Field(default=10_000, ge=0)


DataSpec = Annotated[RowsData | JsonRowsData | SyntheticData | StreamData, Field(discriminator="format")]
