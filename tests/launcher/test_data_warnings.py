"""Data and tokenizers on this machine that are probably not meant: a plan warns of them by name."""

from __future__ import annotations

import gzip
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.display.tables import _length_rows
from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.checks import check_separate_validation
from sm_llm.launcher.planning.draft import Draft
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.load import load

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


REPORTED = "the loss of validation is that of rows which the model was trained on"


def validated(data: dict[str, Any], validation: Any) -> str:
    found = warned(data={**data, "validation": str(validation)})
    return next((it for it in found.splitlines() if REPORTED in it), "")


@pytest.mark.parametrize("form", ["rows", "json_rows"])
def test_12f_rows_that_are_trained_on_and_validated_on_are_warned_of_by_whatever_path(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, other, linked = tmp_path / "train", tmp_path / "other", tmp_path / "linked"
    if form == "rows":
        data = write_rows(folder, [[1, 2, 3, 4], [4, 3, 2, 1]])
        write_rows(other, [[1, 2, 3, 5], [5, 3, 2, 1]])
    else:
        data = json_rows(folder)
        for number, location in enumerate((folder, other)):
            location.mkdir()
            lines = [json.dumps({"input_ids": [number, it, 3, 4, 5, 6]}) for it in range(9)]
            (location / "a.jsonl").write_text("\n".join(lines))
    linked.symlink_to(folder)
    for location in (folder, f"{folder}/", "train", "other/../train", linked, f"file://{folder}"):
        assert "task.data.validation: is the location of task.data.train" in validated(data, location), location
    assert not validated(data, other)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert "holds 1 of 1 file that task.data.train holds" in validated(data, copy)


def test_12f_line_files_below_the_folder_that_is_trained_on_are_read_by_it(tmp_path: Path) -> None:
    inside = tmp_path / "train" / "held_out"
    inside.mkdir(parents=True)
    for location in (inside, inside.parent):
        (location / "a.jsonl").write_text(json.dumps({"input_ids": [len(str(location)) % 99, 2, 3, 4, 5]}) + "\n")
    assert "lies in task.data.train" in validated(json_rows(inside.parent), inside)
    assert "holds the folder of task.data.train" in validated(json_rows(inside), inside.parent)


@pytest.mark.parametrize(
    ("form", "validation", "words"),
    [
        ("rows", "s3://bucket/train", "is the location"),
        ("rows", "s3://bucket/train/", "is the location"),
        ("json_rows", "s3://bucket/train/b", "lies in"),
        ("json_rows", "s3://bucket", "holds the folder"),
        ("rows", "s3://bucket/trained", ""),
        ("json_rows", "s3://bucket/trained", ""),
        ("rows", "s3://other/train", ""),
    ],
)
def test_12f_addresses_in_S3_are_compared_as_places(form: str, validation: str, words: str) -> None:
    data = {"format": form, "train": "s3://bucket/train", "seq_length": 4}
    assert words in validated(data, validation)
    assert bool(words) is bool(validated(data, validation))


def test_12f_a_stream_that_is_validated_on_its_own_split_is_warned_of() -> None:
    stream = {"format": "stream", "dataset": "hf://datasets/a/b", "seq_length": 4, "validation_split": "train"}
    job = load({"name": "x", "task": {"kind": "train", "model": {"preset": "tiny"}, "data": stream, "max_steps": 2,
                                      "tokenizer": "hf://a/b"}}).spec  # fmt: skip
    assert isinstance(job, JobSpec)
    (found,) = check_separate_validation(Draft(job, {}))
    assert found.path == "task.data.validation_split"


def test_12f_files_that_are_left_out_are_named_where_nothing_else_is_there(tmp_path: Path) -> None:
    for name in ("_a.json", ".b.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(PlanError, match=r"found: nothing; left out: 2 files whose path has a name with \. or _"):
        warned(data=json_rows(tmp_path))


def test_12f_a_plan_without_validation_rows_shows_no_interval() -> None:
    job = {"name": "x", "task": {"kind": "train", "model": {"preset": "tiny"}, "max_steps": 90, "data": SYNTHETIC}}
    without, held_out = plan(job, "task.validation.every_steps=5"), plan(job, "task.data.validation_rows=4")
    assert dict(_length_rows(without[0]))["validation"] == "none: task.data names no validation rows"
    assert dict(_length_rows(held_out[0]))["validation"].startswith("every ")


def test_12f_two_ways_to_start_are_named_as_two(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"task\.start has one of the two, pretrained or checkpoint: leave one out"):
        warned(data=SYNTHETIC, start={"pretrained": "a", "checkpoint": "b"})


def test_12f_the_name_of_a_run_is_answered_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("a-20260101-000000-0001", "a-20260102-000000-0002", "ab-20260103-000000-0003"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "run.json").write_text('{"run_id": "x"}')
    for name, meant in {"a": "a-20260102-000000-0002", "a@4": "a-20260102-000000-0002@4",
                        "a-20260101-000000-0001": "a-20260101-000000-0001"}.items():  # fmt: skip
        with pytest.raises(PlanError, match=rf"Write the folder of the run: .*runs/{meant}"):
            warned(data=SYNTHETIC, start={"checkpoint": name})


def test_12f_a_vocabulary_that_a_step_trains_is_compared_with_the_model() -> None:
    assert not [it for made in plan("tiny-local") for it in made.issues if it.code == "vocabulary-hardly-used"]
    made = plan("tiny-local", "steps.prepare.task.train_tokenizer.vocab_size=300")[1]
    (found,) = [it for it in made.issues if it.code == "vocabulary-hardly-used"]
    assert "300 tokens, but the model's vocabulary has 4,096" in str(found)
