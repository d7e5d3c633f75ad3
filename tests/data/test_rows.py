"""Rows on disk: written and read back, read by ``datasets``, and everything that can be wrong with a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sm_llm.data.describe import RowsInfo, describe_rows
from sm_llm.data.loader import evaluation_batches
from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.data.rows import RowsFolder, RowsSource
from sm_llm.errors import DataError

VOCAB = 200_000


def write(folder: Path, ids: Any, *columns: str, shard: int = 1000, mask: Any = None, vocab: int = VOCAB) -> RowsInfo:
    ids = np.asarray(ids, np.int32)
    with RowsWriter(folder, ids.shape[1], vocab, columns, shard) as writer:
        for begin in range(0, len(ids), 7):
            writer.write(ids[begin : begin + 7], None if mask is None else mask[begin : begin + 7])
        return writer.finish("train", padded=mask is not None)


def numbers(rows: int, seq_length: int = 6) -> Any:
    return np.arange(rows * seq_length, dtype=np.int32).reshape(rows, seq_length)


@pytest.mark.parametrize(("rows", "shard"), [(1, 1), (20, 5), (23, 5), (23, 7), (23, 8), (23, 1000), (5, 2)])
def test_rows_come_back_in_any_order_over_any_number_of_shards(tmp_path: Path, rows: int, shard: int) -> None:
    write(tmp_path, numbers(rows), shard=shard)
    folder = RowsFolder.open(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.arrow"))
    count = -(-rows // shard)
    assert files == [f"data-{n:05d}-of-{count:05d}.arrow" for n in range(count)]
    assert (len(folder), folder.seq_length, folder.columns) == (rows, 6, ("input_ids",))
    wanted = np.random.default_rng(0).integers(0, rows, 50)
    assert np.array_equal(folder.take(wanted)["input_ids"], numbers(rows)[wanted])
    assert folder.file_of(rows - 1) == files[-1]


def test_columns_follow_the_mask(tmp_path: Path) -> None:
    mask = np.ones((9, 6), bool)
    mask[8, 2:] = False
    write(tmp_path, numbers(9), "labels", "attention_mask", mask=mask)
    taken = RowsFolder.open(tmp_path).take(np.array([0, 8]))
    assert taken["labels"].tolist() == [[0, 1, 2, 3, 4, 5], [48, 49, -100, -100, -100, -100]]
    assert taken["attention_mask"].tolist() == [[1] * 6, [1, 1, 0, 0, 0, 0]]
    batch = RowsSource(RowsFolder.open(tmp_path), VOCAB, 0, False).rows(np.array([8]))
    assert batch.labels.tolist() == [[48, 49, -100, -100, -100, -100]]
    assert batch.labels.dtype == batch.input_ids.dtype == np.int64
    assert batch.targets == 1


def test_the_description_needs_no_arrow_and_states_what_was_written(tmp_path: Path) -> None:
    info = write(tmp_path, numbers(20))
    assert describe_rows(tmp_path) == info
    assert info == RowsInfo(
        6, 20, ("input_ids",), vocab_size=VOCAB, tokens=120, max_id=119, padded=False, repeated=False
    )
    code = f"import sys, sm_llm.data.describe as d, pathlib; d.describe_rows(pathlib.Path({str(tmp_path)!r}))"
    check = "; assert not {'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code + check], check=True, env={**os.environ, "PYTHONPATH": str(root)})


def test_load_from_disk_reads_what_we_write(tmp_path: Path) -> None:
    import datasets

    write(tmp_path, numbers(23), "labels", "attention_mask", shard=5)
    loaded = datasets.load_from_disk(str(tmp_path))
    assert np.array_equal(np.array(loaded["input_ids"]), numbers(23))
    assert np.array_equal(np.array(loaded["labels"]), numbers(23))
    assert loaded[3]["attention_mask"] == [1] * 6
    assert loaded.with_format("torch")[0]["input_ids"].shape == (6,)
    assert loaded.split == "train"


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "list"])
def test_we_read_what_datasets_writes(tmp_path: Path, fixed: bool) -> None:
    import datasets

    kind = datasets.Sequence(datasets.Value("int64"), length=6 if fixed else -1)
    features = datasets.Features({"input_ids": kind, "attention_mask": kind, "note": datasets.Value("string")})
    ids = numbers(30)
    mask = np.ones_like(ids)
    mask[4, 3:] = 0
    content = {"input_ids": ids.tolist(), "attention_mask": mask.tolist(), "note": ["x"] * 30}
    datasets.Dataset.from_dict(content, features=features).select(range(2, 25)).save_to_disk(tmp_path, num_shards=3)
    folder = RowsFolder.open(tmp_path)
    assert np.array_equal(folder.take(np.arange(23))["input_ids"], ids[2:25])
    source = RowsSource(folder, VOCAB, 0, False)
    assert source.padded
    assert source.rows(np.array([2])).labels.tolist() == [[24, 25, 26, -100, -100, -100]]
    assert describe_rows(tmp_path).seq_length == (6 if fixed else None)


def test_DT09_ids_beyond_sixteen_bits_neither_wrap_nor_pass_unseen(tmp_path: Path) -> None:
    write(tmp_path / "a", [[70_000, 1], [2, 128_255]])
    assert RowsFolder.open(tmp_path / "a").take(np.array([0, 1]))["input_ids"].tolist() == [[70_000, 1], [2, 128_255]]
    with pytest.raises(DataError, match="token id 70000 lies outside the vocabulary of 70,000 tokens"):
        write(tmp_path / "b", [[70_000, 1]], vocab=70_000)
    with pytest.raises(DataError, match=r"holds token id 128255.*vocabulary has 128000"):
        RowsSource(RowsFolder.open(tmp_path / "a"), 128_000, 0, False)
    with pytest.raises(DataError, match="token id -1 lies outside"):
        write(tmp_path / "c", [[-1, 1]])


def test_DT09_foreign_rows_are_checked_when_they_are_read(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 70_000]]}).save_to_disk(tmp_path)
    source = RowsSource(RowsFolder.open(tmp_path), 65_536, 0, False)
    assert source.rows(np.array([0])).input_ids.tolist() == [[1, 2]]
    with pytest.raises(DataError, match=r"data-00000.*row 1 holds token id 70000 at position 1"):
        source.rows(np.array([0, 1]))


def save_labelled(folder: Path, labels: Any, **columns: Any) -> RowsSource:
    """Rows of a vocabulary of 512 with ``labels``, as ``datasets`` saves them."""
    import datasets

    ids = [[1, 2, 3]] * len(labels)
    datasets.Dataset.from_dict({"input_ids": ids, "labels": labels, **columns}).save_to_disk(folder)
    return RowsSource(RowsFolder.open(folder), 512, 0, False)


@pytest.mark.parametrize("wrong", [999, 512, -1, -99, -101, -(2**40)])
@pytest.mark.parametrize("beside", [5, -100])
def test_labels_outside_the_vocabulary_are_refused_by_file_and_row(tmp_path: Path, wrong: int, beside: int) -> None:
    source = save_labelled(tmp_path, [[1, 2, 3], [beside, wrong, 0]])
    assert source.rows(np.array([0])).labels.tolist() == [[1, 2, 3]]
    expected = (
        rf"{tmp_path}/data-00000\S*: row 1 holds label {wrong} at position 1 of column labels; it must be 0 to 511 "
        r"\(the model's vocabulary has 512 tokens\), or -100, which is not trained on\. Set -100 where"
    )
    with pytest.raises(DataError, match=expected):
        source.rows(np.array([0, 1]))
    with pytest.raises(DataError, match=expected):
        list(evaluation_batches(source, 2, 0, 1))


def test_labels_that_do_not_count_may_hold_anything(tmp_path: Path) -> None:
    source = save_labelled(tmp_path / "a", [[-100, 511, 0], [-100] * 3])
    assert source.rows(np.array([0, 1])).labels.tolist() == [[-100, 511, 0], [-100] * 3]
    source = save_labelled(tmp_path / "b", [[4, -1, 999]], attention_mask=[[1, 0, 0]])
    assert source.rows(np.array([0])).labels.tolist() == [[4, -100, -100]]


def test_token_ids_have_no_value_that_is_ignored(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"input_ids": [[1, -100]]}).save_to_disk(tmp_path)
    with pytest.raises(DataError, match=r"token id -100 at position 1 of column input_ids; it must be 0 to 511 \("):
        RowsSource(RowsFolder.open(tmp_path), 512, 0, False).rows(np.array([0]))


def test_an_unfinished_folder_cannot_be_opened(tmp_path: Path) -> None:
    with RowsWriter(tmp_path, 2, 10, (), 5) as writer:
        writer.write(np.array([[1, 2]], np.int32))
    with pytest.raises(DataError, match="unfinished prepare"):
        RowsFolder.open(tmp_path)


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, numbers(3))
    for name in ("rows.json", "state.json"):
        with pytest.raises(DataError, match=rf"{name}: a file, where a folder of rows is expected"):
            describe_rows(tmp_path / name)


def damage_missing(folder: Path) -> None:
    next(folder.glob("*.arrow")).unlink()


def damage_truncated(folder: Path) -> None:
    path = next(folder.glob("*.arrow"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_empty(folder: Path) -> None:
    next(folder.glob("*.arrow")).write_bytes(b"")


def damage_count(folder: Path) -> None:
    info = json.loads((folder / "rows.json").read_text())
    (folder / "rows.json").write_text(json.dumps({**info, "rows": 24}))


def damage_state(folder: Path) -> None:
    (folder / "state.json").write_text("{")


def damage_indices(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "i.arrow"}]}))


def damage_list(folder: Path) -> None:
    (folder / "state.json").write_text("{}")


def damage_facts(folder: Path) -> None:
    (folder / "rows.json").write_text('{"columns": [], "other": 1}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "not a readable Arrow stream file"),
        (damage_truncated, "not a readable Arrow stream file"),
        (damage_empty, "not a readable Arrow stream file"),
        (damage_count, "24 rows were written, 23 are there"),
        (damage_state, r"state\.json: not readable as JSON"),
        (damage_indices, "flatten_indices"),
        (damage_list, r"state\.json: does not list its data files"),
        (damage_facts, r"rows\.json: not written by this version"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, damage: Any, message: str) -> None:
    write(tmp_path, numbers(23))
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        RowsFolder.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"input_ids": [[1, 2], [3]]}, "rows of 1 to 2 tokens"),
        ({"text": ["a"]}, r"no column input_ids \(columns: text\)"),
        ({"input_ids": ["a"]}, "not lists of integers"),
        ({"input_ids": [[0.5, 1.5]]}, "lists of integers without nulls"),
        ({"input_ids": [[1, 2]], "labels": [[1, 2, 3]]}, "labels rows of 3 tokens, elsewhere 2"),
    ],
)
def test_foreign_content_that_is_not_rows_is_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    import datasets

    datasets.Dataset.from_dict(content).save_to_disk(tmp_path)
    with pytest.raises(DataError, match=message):
        RowsFolder.open(tmp_path)


def test_a_wrong_folder_is_distinguished(tmp_path: Path) -> None:
    import datasets

    write(tmp_path / "parent" / "train", numbers(3))
    for name in ("train", "test"):
        dataset = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": [[1]]})})
        dataset.save_to_disk(tmp_path / f"dict-{name}")
    with pytest.raises(DataError, match="no such folder"):
        RowsFolder.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"holds folders of rows \(train\); name one"):
        RowsFolder.open(tmp_path / "parent")
    with pytest.raises(DataError, match=r"several splits \(train\)"):
        RowsFolder.open(tmp_path / "dict-train")


def test_equal_rows_give_equal_files_and_others_another_fingerprint(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, numbers(9) + first)
    content = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "abc"}
    assert content["a"] == content["b"]
    prints = {name: json.loads(content[name]["state.json"])["_fingerprint"] for name in "abc"}
    assert prints["a"] != prints["c"]


def test_DT20_rows_stay_on_disk(tmp_path: Path) -> None:
    """Opening and reading a few rows of 192 MB must not bring the data into memory."""
    rows = np.zeros((3000, 2048), np.int32)
    with RowsWriter(tmp_path, 2048, 10, (), 2500) as writer:
        for _ in range(8):
            writer.write(rows)
        writer.finish("train", padded=False)
    code = (
        "import re, sys, numpy as np\n"
        "from sm_llm.data.rows import RowsFolder\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "size = lambda name: int(re.search(name + r':\\s+(\\d+) kB', status())[1]) // 1024\n"
        "peak = lambda: size('VmHWM') - size('RssFile')\n"  # without pages of the files, which nobody has copied
        "before = peak(); folder = RowsFolder.open(sys.argv[1])\n"
        "folder.take(np.arange(0, len(folder), 500)); print(len(folder), peak() - before)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 24_000
    assert grown < 60
