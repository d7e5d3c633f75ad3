"""The preparation as a whole: no token lost without a line in the account, and a plain word for every fault."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.prepare import encode, prepare_rows, tokenizer_choice
from sm_llm.data.prepare.documents import is_held_out
from sm_llm.data.prepare.statistics import unigram_entropy
from sm_llm.data.rows import RowsFolder
from sm_llm.errors import DataError

if TYPE_CHECKING:
    from sm_llm.data.prepare.encode import Tokenizer

Write = Callable[[Path, list[Any]], Path]
Run = Callable[..., dict[str, Any]]
Ids = Callable[[Path], Any]


def expected_ids(tokenizer: Path, texts: list[str]) -> list[int]:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(tokenizer / "tokenizer.json"))
    return [i for text in texts for i in [*backend.encode(text, add_special_tokens=False).ids, 0]]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str], write_jsonl: Write) -> Path:
    """Three files, whose ends are not the ends of rows."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(3):
        write_jsonl(folder / f"{number}.jsonl", [{"text": text} for text in texts[number * 100 : number * 100 + 100]])
    return folder


def test_rows_are_the_documents_end_to_end(
    corpus: Path, run_prepare: Run, tokenizer: Path, texts: list[str], tmp_path: Path, all_ids: Ids
) -> None:
    account = run_prepare(corpus)
    expected = expected_ids(tokenizer, texts)
    kept = len(expected) // 16 * 16
    assert all_ids(tmp_path / "out" / "train").tolist() == expected[:kept]
    assert account["tokens_in"] == len(expected)
    assert account["tokens_kept"] == kept
    assert account["tokens_dropped"] == {"tail": len(expected) - kept}
    assert account["documents"]["used"] == len(texts)
    assert account["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert account["encoder"] == "fastokens"
    assert json.loads((tmp_path / "out" / "account.json").read_text()) == account
    assert not (tmp_path / "out" / "validation").exists()


def test_the_hugging_face_pipeline_gives_the_same_ids(
    corpus: Path, run_prepare: Run, tmp_path: Path, tokenizer: Path, all_ids: Ids
) -> None:
    """Against map(tokenize) and the group_texts of the examples, which drops a tail per 1000 documents."""
    import datasets
    from transformers import AutoTokenizer

    run_prepare(corpus)
    reference = AutoTokenizer.from_pretrained(tokenizer)
    files = sorted(map(str, corpus.iterdir()))
    data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))

    def tokenize(rows: Any) -> dict[str, Any]:
        ids = reference(rows["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*part, reference.eos_token_id] for part in ids]}

    def group(rows: Any) -> dict[str, Any]:
        joined = [i for part in rows["input_ids"] for i in part]
        return {"input_ids": [joined[i : i + 16] for i in range(0, len(joined) // 16 * 16, 16)]}

    rows = data.map(tokenize, batched=True, remove_columns=["text"]).map(group, batched=True)
    assert all_ids(tmp_path / "out" / "train").tolist() == [i for row in rows["input_ids"] for i in row]


def test_validation_is_held_out_by_hash_and_nothing_is_in_both(
    corpus: Path, run_prepare: Run, tokenizer: Path, texts: list[str], tmp_path: Path, all_ids: Ids
) -> None:
    account = run_prepare(corpus, validation_fraction=0.2, seed=3)
    for split, held_out in (("train", False), ("validation", True)):
        chosen = [text for text in texts if is_held_out(text, 3, 0.2) == held_out]
        expected = expected_ids(tokenizer, chosen)
        found = all_ids(tmp_path / "out" / split).tolist()
        assert found == expected[: len(found)]
        of_split = account["splits"][split]
        assert of_split["documents"] == len(chosen) == of_split["end_tokens"]
        assert of_split["tokens_in"] == len(expected) == of_split["tokens_kept"] + of_split["tokens_dropped"]["tail"]
        shares = np.bincount(found)[np.bincount(found) > 0] / len(found)
        assert of_split["unigram_entropy_nats"] == pytest.approx(-(shares * np.log(shares)).sum())


def test_the_result_depends_on_text_and_task_only(corpus: Path, run_prepare: Run, tmp_path: Path) -> None:
    trained: dict[str, Any] = {"tokenizer": None, "train_tokenizer": {"vocab_size": 400}, "validation_fraction": 0.1}
    for output in ("a", "b", "b"):  # into a used folder too
        run_prepare(corpus, output=output, **trained)
    files = [{p.relative_to(tmp_path / o): p.read_bytes() for p in (tmp_path / o).rglob("*.*")} for o in "ab"]
    assert files[0] == files[1]
    assert len(files[0]) > 8


def test_columns_and_shards_are_as_asked(corpus: Path, run_prepare: Run, tmp_path: Path) -> None:
    account = run_prepare(corpus, columns=["labels", "attention_mask"], rows_per_shard=100)
    folder = RowsFolder.open(tmp_path / "out" / "train")
    assert folder.columns == ("input_ids", "labels", "attention_mask")
    taken = folder.take(np.arange(len(folder)))
    assert np.array_equal(taken["labels"], taken["input_ids"])
    assert (taken["attention_mask"] == 1).all()
    shards = len(list((tmp_path / "out" / "train").glob("*.arrow")))
    assert shards == -(-account["splits"]["train"]["rows"] // 100) > 1


def test_DT01_too_little_text_is_an_error_with_the_numbers_or_a_padded_row(
    tmp_path: Path, run_prepare: Run, write_jsonl: Write
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat sat"}])
    with pytest.raises(DataError) as caught:
        run_prepare(path, seq_length=64)
    assert "train: 1 document with" in str(caught.value)
    assert "fill no row of 64. Set task.tail=pad" in str(caught.value)
    account = run_prepare(path, seq_length=64, tail="pad")
    split = account["splits"]["train"]
    assert (split["rows"], split["tokens_kept"] + split["padding"]) == (1, 64)
    taken = RowsFolder.open(tmp_path / "out" / "train").take(np.array([0]))
    real = taken["attention_mask"][0] == 1
    assert real.sum() == split["tokens_kept"]
    assert (taken["labels"][0][~real] == -100).all()
    assert np.array_equal(taken["labels"][0][real], taken["input_ids"][0][real])


def test_DT02_documents_shorter_than_a_row_do_not_vanish(
    tmp_path: Path, run_prepare: Run, write_jsonl: Write, texts: list[str], tokenizer: Path, all_ids: Ids
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    account = run_prepare(path, seq_length=1024, tail="pad")
    expected = expected_ids(tokenizer, texts)
    assert max(len(expected_ids(tokenizer, [text])) for text in texts) < 1024
    assert all_ids(tmp_path / "out" / "train")[: len(expected)].tolist() == expected
    assert account["tokens_kept"] == len(expected)
    assert account["tokens_dropped"] == {"tail": 0}


def test_DT06_the_last_token_of_a_document_predicts_its_end_not_the_next_document(
    tmp_path: Path, run_prepare: Run, write_jsonl: Write, tokenizer: Path
) -> None:
    texts = ["the cat sat", "paid for tea", "on a mat"]
    run_prepare(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]), seq_length=64, tail="pad")
    labels = RowsFolder.open(tmp_path / "out" / "train").take(np.array([0]))["labels"][0]
    ends = np.cumsum([len(expected_ids(tokenizer, [text])) for text in texts]) - 1
    assert np.flatnonzero(labels == 0).tolist() == ends.tolist()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(DataError, match="documents could not be distinguished"):
        run_prepare(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "bare"))


def test_DT17_a_document_of_65537_tokens_is_whole(
    tmp_path: Path, run_prepare: Run, write_jsonl: Write, tokenizer: Path, all_ids: Ids
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "é" + "1" * 65_535}, {"text": "the cat"}])
    account = run_prepare(path, tail="pad")
    expected = expected_ids(tokenizer, ["é" + "1" * 65_535, "the cat"])
    assert account["tokens_kept"] == len(expected)
    assert all_ids(tmp_path / "out" / "train")[: len(expected)].tolist() == expected


@pytest.mark.parametrize("rows", [[], [{"text": ""}, None]])
@pytest.mark.parametrize("train", [True, False])
def test_DT11_no_document_is_an_error(
    tmp_path: Path, run_prepare: Run, write_jsonl: Write, rows: list[Any], train: bool
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    fields: dict[str, Any] = {"tokenizer": None} if train else {}
    message = "1 empty .*1 null" if rows else "the files are empty"
    with pytest.raises(DataError, match=f"no document in .*a.jsonl: .*{message}"):
        run_prepare(path, **fields)


def test_DT14_the_account_holds_every_rejected_row(
    tmp_path: Path, run_prepare: Run, write_jsonl: Write, texts: list[str]
) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [[], None, "x", {"text": None}, {"text": ""}, *({"text": t} for t in texts)]
    )
    documents = run_prepare(path)["documents"]
    assert documents["rejected"] == {"not_an_object": 2, "null": 2, "empty": 1}
    assert documents["read"] == documents["used"] + 5 == len(texts) + 5
    assert documents["first_rejected"]["empty"] == f"{path}:5"


def test_DT18_a_disk_too_small_is_reported_before_and_when_it_fills(
    corpus: Path, run_prepare: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(prepare_rows.RowsWriter, "write", full)
    with pytest.raises(DataError, match="the disk is full"):
        run_prepare(corpus)
    monkeypatch.setattr(prepare_rows.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(DataError, match=r"need at least .* GB, .* GB are free"):
        run_prepare(corpus)


def test_an_encoder_caught_erring_is_replaced_and_everything_encoded_again(
    corpus: Path, run_prepare: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, all_ids: Ids
) -> None:
    run_prepare(corpus, output="right")

    class Wrong:
        name = "wrong"

        def __init__(self, tokenizer: Tokenizer) -> None:
            self._reference = tokenizer.reference()
            self._calls = 0

        def encode(self, texts: list[str]) -> tuple[Any, Any]:
            ids, offsets = self._reference.encode(texts)
            self._calls += 1
            return (ids if self._calls < 4 else ids[::-1].copy()), offsets  # rows are written before it errs

    monkeypatch.setattr(encode.Tokenizer, "fast", lambda tokenizer: Wrong(tokenizer))
    account = run_prepare(corpus)
    assert account["encoder"] == "tokenizers"
    assert "the reference encoded everything" in account["notices"][0]
    assert np.array_equal(all_ids(tmp_path / "out" / "train"), all_ids(tmp_path / "right" / "train"))


def test_an_end_token_spelt_out_in_the_text_is_reported(tmp_path: Path, run_prepare: Run, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a <|endoftext|> b " * 8}] * 2)
    account = run_prepare(path)
    assert account["splits"]["train"]["end_tokens"] == 18
    assert account["notices"] == ["16 end tokens come from the text '<|endoftext|>' inside documents"]


def test_the_tokenizer_travels_with_the_rows(corpus: Path, run_prepare: Run, tmp_path: Path, tokenizer: Path) -> None:
    account = run_prepare(corpus)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (tmp_path / "out" / "tokenizer" / name).read_bytes() == (tokenizer / name).read_bytes()
    assert account["tokenizer"] == {"vocab_size": 400, "end_token": "<|endoftext|>", "end_id": 0, "trained": False}


def test_a_text_too_small_for_the_vocabulary_is_reported(tmp_path: Path, run_prepare: Run, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "the cat sat on the mat"}] * 20)
    account = run_prepare(path, tokenizer=None, train_tokenizer={"vocab_size": 5000})
    size = account["tokenizer"]["vocab_size"]
    assert 257 < size < 300
    assert account["notices"] == [f"the text gives a tokenizer of {size} entries, 5000 were asked for"]


def test_tokenizer_training_sees_every_file_and_nothing_held_out(
    tmp_path: Path, write_jsonl: Write, run_prepare: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        write_jsonl(tmp_path / f"{n}.jsonl", [{"text": f"file {n} row {i} " * 5} for i in range(50)]) for n in range(3)
    ]
    seen: list[str] = []
    real = tokenizer_choice.train_tokenizer

    def spy(texts: Any, *rest: Any) -> int:
        seen.extend(texts)
        return real(iter(seen), *rest)

    monkeypatch.setattr(tokenizer_choice, "train_tokenizer", spy)
    fields = {"tokenizer": None, "validation_fraction": 0.3, "train_tokenizer": {"vocab_size": 300, "max_bytes": 3000}}
    run_prepare(*names, **fields)
    assert {text.split()[1] for text in seen} == {"0", "1", "2"}
    assert 2000 < sum(map(len, seen)) < 3600
    assert not any(is_held_out(text, 0, 0.3) for text in seen)


def test_progress_counts_the_bytes_read(corpus: Path, run_prepare: Run) -> None:
    reports: list[Any] = []
    run_prepare(corpus, progress=reports.append)
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert [report.done for report in reports] == sorted(report.done for report in reports)
    assert (reports[-1].done, reports[-1].total, reports[-1].unit) == (size, size, "bytes")


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(np.log(4))
    assert unigram_entropy(np.zeros(4, np.int64)) == 0.0


@pytest.mark.integration
def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, tokenizer: Path, texts: list[str], write_jsonl: Write
) -> None:
    """Twelve times the text: at most a few batches more of peak memory, in a process of its own."""
    part = [{"text": " ".join(texts[:60])}] * 250  # about 4.5 MB
    for name, copies in (("small", 2), ("large", 24)):
        (tmp_path / name).mkdir()
        for number in range(copies):
            write_jsonl(tmp_path / name / f"{number}.jsonl", part)
    code = (
        "import re, sys, pathlib\n"
        "from sm_llm.data.prepare.prepare_rows import prepare\n"
        "from sm_llm.spec.tasks import PrepareTask\n"
        "task = PrepareTask(sources=[sys.argv[1]], seq_length=512, tokenizer=sys.argv[2])\n"
        "prepare(task, pathlib.Path(sys.argv[3]), lambda _: None)\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) // 1024)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    peaks = {}
    for name in ("small", "large"):
        command = [sys.executable, "-c", code, str(tmp_path / name), str(tokenizer), str(tmp_path / f"out-{name}")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        peaks[name] = int(done.stdout)
    assert peaks["large"] - peaks["small"] < 60, peaks
