"""What a folder of rows holds, read from its small JSON files only, so that a plan needs no numpy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sm_llm.errors import DataError
from sm_llm.terminal import counted

DATASET_INFO = "dataset_info.json"
STATE = "state.json"
ROWS_INFO = "rows.json"
"""Ours, beside the two files of ``datasets``: what the writer knows of the rows (``RowsInfo``)."""


@dataclass(frozen=True)
class RowsInfo:
    """Facts of one split. What a foreign folder does not state is None.

    ``tokens`` counts real tokens without padding; ``max_id`` is the largest token id that occurs. ``repeated`` rows are
    all the same row.
    """

    seq_length: int | None
    rows: int | None
    columns: tuple[str, ...]
    vocab_size: int | None = None
    tokens: int | None = None
    max_id: int | None = None
    padded: bool | None = None
    repeated: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_far_smaller(tokenizer: int, vocabulary: int) -> bool:
    """Whether a model's vocabulary is more than a tokenizer's that was rounded up for the hardware."""
    return vocabulary - tokenizer > max(128, vocabulary // 10)


def is_dataset(folder: Path) -> bool:
    """Whether ``folder`` is one saved split (``Dataset.save_to_disk``)."""
    return (folder / STATE).is_file() and (folder / DATASET_INFO).is_file()


def describe_rows(folder: Path) -> RowsInfo:
    """Facts of a rows folder, ours or one that ``datasets`` saved. Raises ``DataError`` if it is neither."""
    folder = Path(folder)
    if not is_dataset(folder):
        raise DataError(_not_rows(folder))
    own = folder / ROWS_INFO
    if own.is_file():
        return _own_facts(own)
    return _from_datasets(folder / DATASET_INFO)


def data_files(folder: Path) -> list[Path]:
    """The Arrow files of a saved split in order. Raises ``DataError`` for a folder whose order is kept elsewhere."""
    state = read_json(folder / STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{folder}: saved with an indices mapping; call flatten_indices() before save_to_disk()")
    try:
        return [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / STATE}: does not list its data files") from error


def assert_rows(folder: Path) -> None:
    """Raise ``DataError`` for a saved split that has no rows to train on: no data file, a lost one, another column."""
    files, columns = data_files(folder), describe_rows(folder).columns
    if lost := [path.name for path in files if not path.is_file()]:
        raise DataError(f"{folder}: {STATE} lists {', '.join(lost[:4])}, which is not there. Prepare or copy it again")
    if not any(path.stat().st_size for path in files):
        raise DataError(f"{folder}: holds nothing: {counted(len(files), 'empty file')}")
    if "input_ids" not in columns:
        listed = ", ".join(columns) or "none"
        raise DataError(f"{folder / DATASET_INFO}: names no column input_ids (columns: {listed})")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ``DataError`` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: a JSON object is expected, found {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object atomically (temporary file in the same folder, then rename)."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _own_facts(path: Path) -> RowsInfo:
    facts = read_json(path)
    try:
        return RowsInfo(**{**facts, "columns": tuple(facts["columns"])})
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: not written by this version ({error}). Prepare the text again") from error


def _from_datasets(path: Path) -> RowsInfo:
    info = read_json(path)
    features, splits = info.get("features") or {}, info.get("splits") or {}
    if not isinstance(features, dict) or not isinstance(splits, dict):
        raise DataError(f"{path}: features and splits must be JSON objects. Save the data set again")
    ids = features.get("input_ids")
    # datasets writes -1 for lists of any length.
    length = ids.get("length", -1) if isinstance(ids, dict) else -1
    counts = [split.get("num_examples") for split in splits.values() if isinstance(split, dict)]
    return RowsInfo(
        seq_length=length if isinstance(length, int) and length > 0 else None,
        # Several counts are those of the dataset's splits, and nothing names the one in this folder.
        rows=counts[0] if len(counts) == 1 else None,
        columns=tuple(features),
    )


def _not_rows(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder of rows"
    if not folder.is_dir():
        return f"{folder}: a file, where a folder of rows is expected. Name the folder that holds {STATE}"
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(read_json(folder / "dataset_dict.json").get("splits", []))
        return f"{folder}: holds several splits ({splits}); name one, e.g. {folder / 'train'}"
    inside = [child.name for child in sorted(folder.iterdir()) if child.is_dir() and is_dataset(child)]
    if inside:
        return f"{folder}: holds folders of rows ({', '.join(inside)}); name one, e.g. {folder / inside[0]}"
    return (
        f"{folder}: not a folder of rows: {STATE} or {DATASET_INFO} is missing (an unfinished prepare?). "
        "Make one with the prepare task, or with save_to_disk of datasets"
    )
