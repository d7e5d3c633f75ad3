"""The AWS examples' line files: padding masked, nothing lost, faults named by file and line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sm_llm.data import json_rows
from sm_llm.data.json_rows import convert
from sm_llm.data.loader import open_source
from sm_llm.data.source import Source
from sm_llm.errors import DataError
from sm_llm.spec.training import JsonRowsData

Write = Callable[[Path, list[Any]], Path]


def row(ids: list[int], mask: list[int] | None = None) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": mask or [1] * len(ids), "other": "x"}


def opened(folder: Path, scratch: Path, seq_length: int = 4, vocab_size: int = 1000, **fields: Any) -> Source:
    data = JsonRowsData(train=str(folder), seq_length=seq_length, shuffle=False, **fields)
    source = open_source(data, "train", vocab_size, 0, scratch=scratch)
    assert isinstance(source, Source)
    return source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def test_lines_of_all_files_become_rows_with_masked_padding(folder: Path, tmp_path: Path, write_jsonl: Write) -> None:
    write_jsonl(folder / "b.json", [row([1, 2, 3, 4]), row([5, 6, 7, 0], [1, 1, 1, 0]), row([8, 9])])
    with gzip.open(folder / "a.json.gz", "wt") as file:
        file.write(json.dumps(row([11, 12, 13, 14])) + "\n\n" + json.dumps({"input_ids": [15, 16, 17, 18]}))
    source = opened(folder, tmp_path / "scratch")
    batch = source.rows(np.arange(source.count))
    assert batch.input_ids[:3].tolist() == [[11, 12, 13, 14], [15, 16, 17, 18], [1, 2, 3, 4]]
    assert batch.labels[2:].tolist() == [[1, 2, 3, 4], [5, 6, 7, -100], [8, 9, -100, -100]]
    assert source.padded
    assert batch.targets == 12 - 3 + 3  # 5 rows of 3 targets, less 1 and 2 masked


def test_longer_lines_lose_no_token(folder: Path, tmp_path: Path, write_jsonl: Write) -> None:
    write_jsonl(folder / "a.json", [row(list(range(1, 11)), [1] * 9 + [0]), row([20, 21, 22, 23])])
    source = opened(folder, tmp_path / "scratch")
    labels = source.rows(np.arange(source.count)).labels
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, -100, -100, -100], [20, 21, 22, 23]]


def test_blocks_do_not_cut_lines(
    folder: Path, tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[n * 4 + i for i in range(4)] for n in range(200)]
    write_jsonl(folder / "a.json", [row(ids) for ids in rows])
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", 100)
    source = opened(folder, tmp_path / "scratch")
    assert source.rows(np.arange(200)).input_ids.tolist() == rows
    assert not source.padded


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not JSON"),
        ("[1, 2]", "a JSON object is expected, found list"),
        ("null", "a JSON object is expected, found NoneType"),
        ('{"text": "x"}', "input_ids must be a list of whole numbers; fields found: text"),
        ('{"input_ids": null}', "input_ids must be a list"),
        ('{"input_ids": [1, null]}', "input_ids must be a list of whole numbers"),
        ('{"input_ids": [1, 2.5]}', "input_ids must be a list of whole numbers"),
        ('{"input_ids": [1, 2], "attention_mask": [1]}', r"attention_mask must be .* as long as input_ids \(2\)"),
        ('{"input_ids": [1, 1000]}', "token id 1000 lies outside the vocabulary of 1000"),
        ('{"input_ids": [-1, 2]}', "token id -1 lies outside"),
    ],
)
@pytest.mark.parametrize("block", [100, 10**6])
def test_DT13_a_wrong_line_is_named(
    folder: Path, tmp_path: Path, line: str, message: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", block)
    good = json.dumps(row([1, 2, 3, 4]))
    (folder / "a.json").write_text("\n".join([good, "", good, line, good]) + "\n")
    with pytest.raises(DataError, match=rf"a\.json:4: {message}"):
        convert(folder, 4, 1000, tmp_path / "scratch")
    assert not list((tmp_path / "scratch").glob("*/state.json"))


@pytest.mark.parametrize("labels", [[1, -100, 3, 4], [1, 2, 3], [2, 3, 4, 5]])
def test_labels_that_would_have_no_effect_are_refused(
    labels: list[int], folder: Path, tmp_path: Path, write_jsonl: Write
) -> None:
    write_jsonl(folder / "a.json", [row([1, 2, 3, 4]), {**row([1, 2, 3, 4]), "labels": labels}])
    with pytest.raises(DataError, match=r"a\.json:2: labels are not those of input_ids.*task\.data\.format=rows"):
        convert(folder, 4, 1000, tmp_path / "scratch")


def test_labels_that_repeat_the_ids_are_taken_and_fields_that_are_not_read_are_named(
    folder: Path, tmp_path: Path, write_jsonl: Write
) -> None:
    lines = [{**row([1, 2, 3, 0], [1, 1, 1, 0]), "labels": [1, 2, 3, -100]}, {**row([5, 6, 7, 8]), "labels": None}]
    write_jsonl(folder / "a.json", lines)
    write_jsonl(folder / "b.json", [{"input_ids": [1, 2, 3, 4], "labels": "positive", "loss_mask": [1, 0, 1, 1]}])
    source = opened(folder, tmp_path / "scratch")
    assert source.rows(np.arange(3)).labels.tolist() == [[1, 2, 3, -100], [5, 6, 7, 8], [1, 2, 3, 4]]
    assert f"{folder}: fields that are not read: loss_mask other" in source.notices


def test_DT11_folders_without_rows_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        convert(tmp_path / "nowhere", 4, 10, tmp_path)
    (folder / "a.zst").write_text("x")
    with pytest.raises(DataError, match=r"no file ends in .*found: \.zst"):
        convert(folder, 4, 10, tmp_path / "scratch")
    (folder / "a.json").write_text("\n")
    with pytest.raises(DataError, match="no rows in 1 file"):
        convert(folder, 4, 10, tmp_path / "scratch")
    (folder / "a.json.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match="not a whole gzip file"):
        convert(folder, 4, 10, tmp_path / "scratch")


def test_the_conversion_is_made_once_and_again_when_a_file_changed(
    folder: Path, tmp_path: Path, write_jsonl: Write
) -> None:
    write_jsonl(folder / "a.json", [row([1, 2, 3, 4])])
    first = convert(folder, 4, 1000, tmp_path / "scratch")
    made = (first / "state.json").stat().st_mtime_ns
    assert convert(folder, 4, 1000, tmp_path / "scratch") == first
    assert (first / "state.json").stat().st_mtime_ns == made
    assert convert(folder, 8, 1000, tmp_path / "scratch") != first
    write_jsonl(folder / "a.json", [row([5, 6, 7, 8]), row([1, 2])])
    assert convert(folder, 4, 1000, tmp_path / "scratch") != first


def test_all_processes_of_a_node_share_one_conversion(folder: Path, tmp_path: Path, write_jsonl: Write) -> None:
    write_jsonl(folder / "a.json", [row([1, 2, 3, 4])] * 5000)
    code = (
        "import sys, pathlib\n"
        "from sm_llm.data.json_rows import convert\n"
        "from sm_llm.data.rows import RowsFolder\n"
        "print(len(RowsFolder.open(convert(pathlib.Path(sys.argv[1]), 4, 1000, pathlib.Path(sys.argv[2])))))\n"
    )
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "scratch")]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in running] == ["5000"] * 3
    assert len(list((tmp_path / "scratch").glob("json-rows-*/"))) == 1


@pytest.mark.integration
def test_no_python_object_per_token(folder: Path, tmp_path: Path, write_jsonl: Write) -> None:
    """A row of 100,000 tokens is never as many objects: neither made by Python's parser, nor looped over."""
    tokens = 100_000
    write_jsonl(folder / "a.json", [row(list(range(1000, 1000 + tokens)))] * 3)

    def loop() -> None:
        for line in (folder / "a.json").open():
            np.array(json.loads(line)["input_ids"], np.int32)

    assert most_objects(loop) > tokens / 2, "what is counted"
    assert most_objects(lambda: [int(it) for it in range(tokens)]) > tokens / 2
    (tmp_path / "first").mkdir()
    write_jsonl(tmp_path / "first" / "a.json", [row([1])])
    convert(tmp_path / "first", 2000, 200_000, tmp_path / "scratch")  # imports what it needs: objects, too
    assert most_objects(lambda: convert(folder, 2000, 200_000, tmp_path / "scratch")) < tokens / 4


def most_objects(work: Callable[[], object]) -> int:
    """How many more small objects there are, at most, when a function that ``work`` calls begins or returns."""
    before, most = sys.getallocatedblocks(), 0

    def poll(*_: object) -> None:
        nonlocal most
        most = max(most, sys.getallocatedblocks() - before)

    sys.setprofile(poll)
    try:
        work()
    finally:
        sys.setprofile(None)
    return most
