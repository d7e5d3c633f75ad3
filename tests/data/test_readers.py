"""Reading documents: every kind of file, and every kind of row that is no document."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sm_llm.data.json_rows import left_out
from sm_llm.data.peek import line_files
from sm_llm.data.prepare.documents import BATCH_DOCUMENTS, Documents, Rejections, is_held_out
from sm_llm.data.prepare.source_files import find_files
from sm_llm.errors import DataError

TEXTS = ["first", "zweiter\nüber zwei Zeilen", "третий", "四番目 🙂"]
Write = Callable[[Path, list[Any]], Path]


def read(*sources: Path | str, field: str = "text") -> tuple[list[Documents], Rejections]:
    rejections = Rejections()
    files = find_files([str(source) for source in sources], lambda _: None)
    return [batch for file in files for batch in file.documents(field, rejections)], rejections


def texts_of(*sources: Path | str, field: str = "text") -> list[str]:
    return [text for batch in read(*sources, field=field)[0] for text in batch.texts]


def make_txt(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")


def make_jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"n": 1, "text": text}) + "\n" for text in TEXTS))


def make_jsonl_gz(folder: Path) -> None:
    with gzip.open(folder / "a.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS))


def make_parquet(folder: Path) -> None:
    pq.write_table(pa.table({"n": list(range(4)), "text": TEXTS}), folder / "a.parquet", row_group_size=2)


def make_dataset(folder: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": ["no", *TEXTS], "n": list(range(5))})
    dataset.select(range(1, 5)).save_to_disk(folder, num_shards=2)


@pytest.mark.parametrize("make", [make_txt, make_jsonl, make_jsonl_gz, make_parquet, make_dataset])
def test_every_kind_of_source_gives_the_same_documents(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    assert texts_of(tmp_path) == TEXTS
    batches, rejections = read(tmp_path)
    assert [size for batch in batches for size in batch.sizes] == [len(text.encode()) for text in TEXTS]
    assert rejections.counts == {}


def test_sources_and_folders_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.txt", "a.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path) == ["a.txt", "b/10.txt", "b/2.txt", "c.txt"]
    assert texts_of(tmp_path / "c.txt", tmp_path / "b") == ["c.txt", "b/10.txt", "b/2.txt"]
    assert texts_of(f"file://{tmp_path}/c.txt") == ["c.txt"]


def test_the_builtin_text_is_real_english_in_sections() -> None:
    sections = texts_of("builtin:python-docs")
    assert len(sections) > 150
    assert sum(map(len, sections)) > 300_000
    assert any("assert" in section for section in sections)
    assert texts_of("builtin:python-docs") == sections
    with pytest.raises(DataError, match="no such built-in text; there is builtin:python-docs"):
        read("builtin:nothing")


def test_batches_are_bounded_and_report_where_they_are(tmp_path: Path, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"t{n}"} for n in range(BATCH_DOCUMENTS + 5)])
    batches, _ = read(path)
    assert [len(batch.texts) for batch in batches] == [BATCH_DOCUMENTS, 5]
    assert batches[1].lines == list(range(BATCH_DOCUMENTS + 1, BATCH_DOCUMENTS + 6))
    assert 0 < batches[0].fraction <= batches[1].fraction == 1.0
    big = write_jsonl(tmp_path / "b.jsonl", [{"text": "x" * 5_000_000}] * 3)
    assert [len(batch.texts) for batch in read(big)[0]] == [2, 1]


def test_DT14_rows_that_are_no_documents_are_counted_by_reason(tmp_path: Path) -> None:
    lines = ["[]", "null", '"x"', '{"text": null}', '{"text": ""}', '{"text": " \\n"}', '{"text": 7}', "{broken", "",
             '{"text": "\\ud800"}', '{"other": 1}', '{"text": "good"}']  # fmt: skip
    path = tmp_path / "mixed.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    batches, rejections = read(path)
    assert [batch.texts for batch in batches] == [["good"]]
    twice = dict.fromkeys(("not_an_object", "null", "empty", "invalid_json"), 2)
    assert rejections.counts == {**twice, "not_text": 1, "not_unicode": 1, "missing_field": 1}
    assert rejections.first["not_text"] == f"{path}:7"
    assert rejections.first["missing_field"] == f"{path}:11"


def test_DT14_null_and_empty_cells_of_tables_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "", "b"]}), tmp_path / "a.parquet")
    (tmp_path / "latin.txt").write_bytes("über".encode("latin-1"))
    batches, rejections = read(tmp_path)
    assert [batch.texts for batch in batches] == [["a", "b"]]
    assert rejections.counts == {"null": 1, "empty": 1, "not_utf8": 1}


def test_DT13_a_field_that_is_never_there_is_an_error(tmp_path: Path, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [[], {"content": "x", "id": 1}, {"content": "y"}])
    with pytest.raises(DataError) as caught:
        read(path)
    assert f"{path}:2" in str(caught.value)
    assert "fields found: content, id" in str(caught.value)
    assert "task.text_field" in str(caught.value)
    assert texts_of(path, field="content") == ["x", "y"]


def test_DT13_a_column_that_is_not_there_or_not_text_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; columns found: content, n"):
        read(tmp_path)
    with pytest.raises(DataError, match="column 'n' holds int64, not text"):
        read(tmp_path, field="n")


def test_DT11_files_nobody_can_read_are_an_error_or_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    (tmp_path / ".hidden.txt").write_text("x")
    with pytest.raises(DataError, match=r"1 file of other kinds \(\.zst\) found; readable are \.jsonl, \.jsonl\.gz"):
        read(tmp_path)
    with pytest.raises(DataError, match="cannot read this kind of file"):
        read(tmp_path / "a.jsonl.zst")
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "b.txt").write_text("good")
    notices: list[str] = []
    assert len(find_files([str(tmp_path)], notices.append)) == 1
    assert "1 file of other kinds left out (.zst)" in notices[0]


def test_C8_what_runs_have_written_inside_a_source_is_left_out_and_reported(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "prepare-1"
    (run / "events").mkdir(parents=True)
    (run / "run.json").write_text('{"run_id": "prepare-1"}')
    (run / "events" / "attempt-1-rank0.jsonl").write_text('{"text": "an event", "input_ids": [1, 2]}\n')
    with pytest.raises(DataError, match="nothing beside 1 run folder found"):
        read(tmp_path)
    with pytest.raises(DataError, match="no file ends in"):
        line_files(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "good", "input_ids": [1, 2]}\n')
    (tmp_path / "run.json").write_text("{}")
    notices: list[str] = []
    assert [file.path.name for file in find_files([str(tmp_path)], notices.append)] == ["b.jsonl"]
    reported = f"{tmp_path}: 1 run folder left out (in runs)"
    assert reported in notices
    assert [path.name for path in line_files(tmp_path)] == ["b.jsonl", "run.json"]
    assert left_out(tmp_path) == [reported]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("content", [b"not that kind of file at all", None], ids=["garbage", "truncated"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    if content is None:
        (make_parquet if name.endswith("parquet") else make_jsonl_gz)(tmp_path)
        content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    with pytest.raises(DataError, match=name):
        read(path)


def test_a_dataset_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    import datasets

    part = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path)
    with pytest.raises(DataError, match=r"several splits \(train, test\); name one, e\.g\. .*/train"):
        read(tmp_path)
    assert texts_of(tmp_path / "test") == ["a"]


def test_holding_out_depends_on_the_text_and_the_seed_only() -> None:
    texts = [f"document {n}" for n in range(4000)]
    held = {text for text in texts if is_held_out(text, 0, 0.1)}
    assert 300 < len(held) < 500
    assert held == {text for text in reversed(texts) if is_held_out(text, 0, 0.1)}
    assert held < {text for text in texts if is_held_out(text, 0, 0.2)}
    assert held != {text for text in texts if is_held_out(text, 1, 0.1)}
    assert not any(is_held_out(text, 0, 0.0) for text in texts)
