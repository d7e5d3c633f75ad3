"""Data and tokenizers on this machine that are probably not meant: a plan warns of them by name."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.errors import PlanError
from sm_llm.launcher.planner import plan

if TYPE_CHECKING:
    from pathlib import Path


def warned(**task: Any) -> str:
    fields = {"kind": "train", "model": {"preset": "tiny", "config": {"vocab_size": 512}}, "max_steps": 2}
    (only,) = plan({"name": "x", "task": {**fields, **task}})
    return "\n".join(only.warnings)


def json_rows(folder: Path, seq_length: int = 4) -> dict[str, Any]:
    return {"format": "json_rows", "train": str(folder), "seq_length": seq_length}


def write_rows(folder: Path, ids: list[list[int]], vocabulary: int = 500) -> dict[str, Any]:
    with RowsWriter(folder, 4, vocabulary, (), 100) as writer:
        for row in ids:
            writer.write(np.array([row], np.int32))
        writer.finish("train", padded=False)
    return {"format": "rows", "train": str(folder), "seq_length": 4}


def tokenizer(folder: Path, size: int) -> str:
    folder.mkdir()
    model = {"type": "BPE", "vocab": {f"t{number}": number for number in range(size)}, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    return str(folder)


SYNTHETIC = {"format": "synthetic", "seq_length": 4, "rows": 50}


@pytest.mark.parametrize(("size", "warns"), [(512, False), (500, False), (390, False), (300, True), (20, True)])
def test_C7_a_tokenizer_far_smaller_than_the_vocabulary_is_warned_of(size: int, warns: bool, tmp_path: Path) -> None:
    reported = warned(data=SYNTHETIC, tokenizer=tokenizer(tmp_path / "t", size))
    assert (f"task.tokenizer: {size:,} tokens, but the model's vocabulary has 512" in reported) == warns
    rows = write_rows(tmp_path / "rows", [[1, 2, 3, 4], [4, 3, 2, 1]], vocabulary=size)
    assert (f"task.data.train: {size:,} tokens, but the model's vocabulary has 512" in warned(data=rows)) == warns


def test_a_tokenizer_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="holds no tokens, so it is no tokenizer"):
        warned(data=SYNTHETIC, tokenizer=tokenizer(tmp_path / "t", 0))


def test_C7_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"task\.tokenizer .*: has a vocabulary of 513, more than the model's 512"):
        warned(data=SYNTHETIC, tokenizer=tokenizer(tmp_path / "t", 513))


@pytest.mark.parametrize(
    ("rows", "reported"),
    [
        ([[1, 2, 3, 4]], "the data hold a single row"),
        ([[1, 2, 3, 4]] * 5, "all 5 rows are the same row"),
        ([[1, 2, 3, 4]] * 5 + [[1, 2, 3, 5]], None),
    ],
)
def test_C7_one_row_again_and_again_is_warned_of(rows: list[list[int]], reported: str | None, tmp_path: Path) -> None:
    found = warned(data=write_rows(tmp_path / "rows", rows))
    assert reported in found if reported else "by heart" not in found


@pytest.mark.parametrize("compressed", [False, True])
def test_C7_the_same_of_line_files(compressed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()

    def reported(*rows: list[int]) -> str:
        body = "".join(json.dumps({"input_ids": row}) + "\n" for row in rows).encode()
        (folder / ("a.json.gz" if compressed else "a.json")).write_bytes(gzip.compress(body) if compressed else body)
        return warned(data=json_rows(folder))

    assert "the data hold a single row" in reported([1, 2, 3])
    assert "the first 3 lines are the same row" in reported(*[[1, 2, 3]] * 3)
    assert "by heart" not in reported([1, 2, 3], [1, 2, 4])
    assert "by heart" not in reported([1] * 5)  # cut into two rows
    (folder / "_other.json").write_text('{"input_ids": [7]}\n')
    assert "the data hold a single row" in reported([1, 2, 3])
    (folder / "b.jsonl").write_text("[broken")
    assert "by heart" not in reported([1, 2, 3])
