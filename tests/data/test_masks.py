"""Masks that attention cannot keep, and files that are damaged or not meant: named, refused or counted."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data import json_rows
from sm_llm.data.json_rows import convert, left_out
from sm_llm.data.loader import open_source
from sm_llm.data.rows import RowsFolder, RowsSource
from sm_llm.data.soundness import check_targets, name_rows, warnings
from sm_llm.data.source import IGNORED
from sm_llm.errors import DataError, PlanError
from sm_llm.launcher.planner import plan
from sm_llm.spec.training import JsonRowsData

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows").mkdir()
    return tmp_path / "rows"


def lines(*rows: tuple[list[int], list[Any] | None]) -> str:
    texts = [{"input_ids": ids, **({} if mask is None else {"attention_mask": mask})} for ids, mask in rows]
    return "".join(json.dumps(text) + "\n" for text in texts)


def opened(folder: Path, seq_length: int = 4) -> RowsSource:
    data = JsonRowsData(train=str(folder), seq_length=seq_length, shuffle=False)
    source = open_source(data, "train", 1000, 0, scratch=folder.parent / "scratch")
    assert isinstance(source, RowsSource)
    return source


def labels(source: RowsSource) -> Any:
    return source.rows(np.arange(source.count)).labels.tolist()


@pytest.mark.parametrize(
    ("mask", "reported"),
    [
        ([0, 0, 1, 1], "is 0 before position 2"),
        ([1, 0, 1, 1], "is 0 before position 2"),
        ([False, True, True, True], "is 0 before position 1"),
        ([1, 1, 0, 1], "is 0 before position 3"),
        ([1, 2, 3, 3], "must be a list of 0 and 1"),
        ([1, 1, -1, 0], "must be a list of 0 and 1"),
        ([1, 1, "1", 0], "must be a list of 0 and 1"),
    ],
)
@pytest.mark.parametrize("block", [40, 10**6])
def test_F5_a_mask_that_is_not_ones_then_zeros_is_refused(
    mask: list[Any], reported: str, block: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "BLOCK_BYTES", block)
    (folder / "a.json").write_text(lines(([1, 2, 3, 4], [1, 1, 0, 0]), ([5, 6, 7, 8], mask)))
    with pytest.raises(DataError, match=rf"a\.json:2: attention_mask .*{reported}"):
        convert(folder, 4, 1000, folder.parent / "scratch")


def test_F5_a_mask_ends_where_the_next_row_begins(folder: Path) -> None:
    """The rise from one row's padding to the next row's text is none."""
    (folder / "a.json").write_text(lines(([1, 2, 0], [1, 1, 0]), ([], None), ([3, 4, 5, 6], [1] * 4), ([7], [0])))
    assert labels(opened(folder)) == [[1, 2, IGNORED, IGNORED], [3, 4, 5, 6], [IGNORED] * 4]


@pytest.mark.parametrize("kind", ["int8", "bool", "int64"])
def test_F5_the_same_of_rows_that_others_saved(kind: str, tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int64")),
            "attention_mask": datasets.Sequence(datasets.Value(kind)),
        }
    )
    masks = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 1]]
    content = {"input_ids": [[1, 2, 3, 4]] * 3, "attention_mask": masks}
    datasets.Dataset.from_dict(content, features=features).save_to_disk(tmp_path)
    source = RowsSource(RowsFolder.open(tmp_path), 10, 0, False)
    assert source.rows(np.array([0, 1])).labels.tolist() == [[1, 2, IGNORED, IGNORED], [1, 2, 3, 4]]
    with pytest.raises(DataError, match=r"\.arrow: row 2: attention_mask must be ones, then zeros"):
        source.rows(np.array([1, 2]))


def test_masks_of_true_and_false_are_masks(folder: Path) -> None:
    (folder / "a.json").write_text(lines(([1, 2, 3, 4], [True, True, False, False]), ([5, 6, 7, 8], [1, 1, 1, 0])))
    assert labels(opened(folder)) == [[1, 2, IGNORED, IGNORED], [5, 6, 7, IGNORED]]


def test_a_byte_order_mark_is_not_a_text(folder: Path, run_prepare: Run) -> None:
    (folder / "a.json").write_bytes(b"\xef\xbb\xbf" + lines(([1, 2, 3, 4], None)).encode())
    with gzip.open(folder / "b.json.gz", "wb") as stream:
        stream.write(b"\xef\xbb\xbf\n" + lines(([5, 6, 7, 8], None)).encode())
    assert labels(opened(folder)) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    (folder / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps({"text": "a " * 100}).encode())
    assert run_prepare(folder / "c.jsonl")["documents"]["used"] == 1


def test_what_follows_the_last_token_of_a_long_line_makes_no_rows(folder: Path) -> None:
    (folder / "a.json").write_text(
        lines((list(range(1, 13)), [1] * 3 + [0] * 9), ([1] * 8, [0] * 8), ([9, 8, 7, 6], None))
    )
    source = opened(folder)
    assert labels(source) == [[1, 2, 3, IGNORED], [IGNORED] * 4, [9, 8, 7, 6]]
    assert [source.location(row) for row in range(3)] == [f"{folder}/a.json:{line}" for line in (1, 2, 3)]


def test_rows_are_named_by_file_and_line(folder: Path) -> None:
    (folder / "a.json").write_text("\n" + lines(([1] * 10, None), ([2, 3], None)))
    with gzip.open(folder / "b.jsonl.gz", "wt") as stream:
        stream.write(lines(([], None), ([4, 5, 6], [1, 0, 0])))
    source = opened(folder)
    assert [source.location(row) for row in range(source.count)] == [
        *[f"{folder}/a.json:2"] * 3,
        f"{folder}/a.json:3",
        f"{folder}/b.jsonl.gz:2",
    ]
    assert name_rows(source, np.arange(5)).endswith("a.json:2,3 and 1 more")
    assert f"{folder}: 1 row without a label to learn from" in source.notices


def test_F6_rows_without_any_label_are_refused_when_they_are_opened(folder: Path) -> None:
    (folder / "a.json").write_text(lines(([1, 2, 3, 4], [1, 0, 0, 0]), ([5, 6], [0, 0])))
    source = opened(folder)
    with pytest.raises(DataError, match=r"task\.data\.train: none of the 2 rows has a label .*a\.json:1,2\)"):
        check_targets(source, "task.data.train")
    (folder / "b.json").write_text(lines(([1, 2], None)))
    source = opened(folder)
    check_targets(source, "task.data.train")
    with pytest.raises(DataError, match="none of the 2 rows"):
        check_targets(source, "task.data.validation", 2)


def damaged(kind: str) -> bytes:
    whole = gzip.compress(
        "".join(json.dumps({"text": f"{n} " * 200, "input_ids": [1]}) + "\n" for n in range(500)).encode()
    )
    if kind == "truncated":
        return whole[: len(whole) // 2]
    if kind == "altered":
        return whole[:200] + bytes(byte ^ 0xFF for byte in whole[200:260]) + whole[260:]
    if kind == "checksum":
        return whole[:-8] + b"\0" * 4 + whole[-4:]
    if kind == "garbage behind":
        return whole + b"garbage"
    if kind == "zlib":
        return zlib.compress(b"{}")
    return b"no gzip"


KINDS = ["truncated", "altered", "checksum", "garbage behind", "zlib", "foreign"]


@pytest.mark.parametrize("kind", KINDS)
def test_F7_a_damaged_gzip_file_is_named(kind: str, folder: Path, run_prepare: Run) -> None:
    (folder / "a.jsonl.gz").write_bytes(damaged(kind))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: not a whole gzip file \(after line [\d,]+: .*Fetch it again"):
        run_prepare(folder)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: not a whole gzip file \(after line [\d,]+: .*Fetch it again"):
        convert(folder, 4, 1000, folder.parent / "scratch")
    # A plan reads the first lines alone.
    if kind in ("zlib", "foreign"):
        with pytest.raises(PlanError, match=r"a\.jsonl\.gz: not a whole gzip file .*\)\. Fetch it again") as raised:
            plan("tiny-local", {"task.data": {"format": "json_rows", "train": str(folder), "seq_length": 4}})
        assert "prepare task" not in str(raised.value)


def test_F7_a_gzip_file_of_several_members_is_whole(folder: Path, run_prepare: Run) -> None:
    parts = [{"text": "a b c " * 50, "input_ids": [1, 2, 3, 4]}, {"text": "d e f " * 50, "input_ids": [5, 6, 7, 8]}]
    body = b"".join(gzip.compress(json.dumps(part).encode() + b"\n") for part in parts)
    (folder / "a.jsonl.gz").write_bytes(body)
    assert run_prepare(folder)["documents"]["used"] == 2
    assert labels(opened(folder)) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_F8_deep_nesting_is_a_bad_row_of_its_line(folder: Path, run_prepare: Run) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    good = json.dumps({"text": "a b c " * 50, "input_ids": [1, 2, 3, 4]})
    (folder / "a.jsonl").write_text("\n".join([good, '{"text": ' + deep + "}", good]))
    documents = run_prepare(folder)["documents"]
    assert (documents["used"], documents["rejected"]) == (2, {"invalid_json": 1})
    assert documents["first_rejected"] == {"invalid_json": f"{folder}/a.jsonl:2"}
    (folder / "a.jsonl").write_text("\n".join([good, '{"input_ids": ' + deep + "}"]))
    with pytest.raises(DataError, match=r"a\.jsonl:2: not a row of token ids \(it is nested too deeply\)"):
        convert(folder, 4, 1000, folder.parent / "scratch")


def test_hidden_files_are_counted_as_left_out(folder: Path, run_prepare: Run) -> None:
    good = json.dumps({"text": "a b c " * 50, "input_ids": [1, 2, 3, 4]}) + "\n"
    for name in ("a.jsonl", ".b.jsonl", "_c.jsonl", "d.bin", ".cache/e.jsonl", "_SUCCESS"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(good)
    notices = run_prepare(folder)["notices"]
    assert f"{folder}: 4 hidden files left out (names that begin with . or _)" in notices
    assert f"{folder}: 1 file of other kinds left out (.bin)" in notices
    source = opened(folder)
    assert labels(source) == [[1, 2, 3, 4]]
    assert set(left_out(folder)) <= set(source.notices)
    assert left_out(folder)[0].endswith("4 hidden files (names that begin with . or _) left out")


def test_C7_a_single_row_again_and_again_is_reported(folder: Path) -> None:
    (folder / "a.json").write_text(lines(*[([1, 2, 3, 4], None)] * 600))
    assert any("256 of 600 rows of the data are the same row" in it for it in warnings(opened(folder)))
    (folder / "a.json").write_text(lines(([1, 2, 3, 4], None)))
    os.utime(folder / "a.json", (1, 1))
    assert any("the data hold a single row" in it for it in warnings(opened(folder)))
    (folder / "a.json").write_text(lines(*[([1, 2, 3, 4], None)] * 5, ([1, 2, 3, 5], None)))
    assert warnings(opened(folder)) == []


def test_C7_rows_of_a_far_smaller_tokenizer_are_reported(folder: Path, run_prepare: Run, tmp_path: Path) -> None:
    (folder / "a.txt").write_text("the cat sat on a mat " * 100)
    run_prepare(folder)
    rows = RowsFolder.open(tmp_path / "out" / "train")
    assert warnings(RowsSource(rows, 448, 0, False)) == []
    found = warnings(RowsSource(rows, 1024, 0, False))
    assert len(found) == 1
    assert "made with 400 tokens, the model's vocabulary has 1,024" in found[0]
