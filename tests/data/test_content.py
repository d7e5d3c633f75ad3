"""The digest of training data: equal for equal contents wherever they lie, another for any other rows."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

from sm_llm.data import content
from sm_llm.data.content import data_digest, files_digest, tokenizer_digest
from sm_llm.data.prepare.rows_writer import RowsWriter
from sm_llm.spec.training import JsonRowsData, RowsData, StreamData, SyntheticData

if TYPE_CHECKING:
    from pathlib import Path


def write_rows(folder: Path, ids: np.ndarray) -> RowsData:
    with RowsWriter(folder, ids.shape[1], 100, (), 3) as writer:
        writer.write(ids.astype(np.int32))
        writer.finish("train", padded=False)
    return RowsData(train=str(folder), seq_length=ids.shape[1])


def test_F1_rows_have_the_same_digest_in_another_folder_and_another_when_one_token_is_edited(tmp_path: Path) -> None:
    ids = np.arange(80).reshape(10, 8)
    first = data_digest(write_rows(tmp_path / "a", ids))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert data_digest(RowsData(train=str(tmp_path / "b"), seq_length=8)) == first
    edited = ids.copy()
    edited[7, 3] = 1
    assert data_digest(write_rows(tmp_path / "c", edited)) != first
    assert data_digest(write_rows(tmp_path / "d", ids[::-1])) != first, "another order"


def test_F1_line_files_that_are_edited_in_place_have_another_digest(tmp_path: Path) -> None:
    lines = tmp_path / "part.json"
    lines.write_text('{"input_ids": [1, 2]}\n')
    data = JsonRowsData(train=str(tmp_path), seq_length=2)
    first = data_digest(data)
    lines.write_text('{"input_ids": [1, 3]}\n')
    assert data_digest(data) != first
    lines.write_text('{"input_ids": [1, 2]}\n')
    assert data_digest(data) == first, "times do not count"
    (tmp_path / "notes.txt").write_text("of no account")
    assert data_digest(data) == first


def test_large_data_are_sampled_and_every_size_counts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    body = np.random.default_rng(0).bytes(3_000_000)
    for file in files:
        file.write_bytes(body)
    first = files_digest(files, whole_bytes=0)
    assert files_digest(files, whole_bytes=0) == first
    files[1].write_bytes(body[:-1] + b"?")
    assert files_digest(files, whole_bytes=0) != first, "the end of all is among the samples"
    files[1].write_bytes(body + b"x")
    assert files_digest(files, whole_bytes=0) != first
    assert files_digest(files) != first


def test_the_samples_of_large_data_are_bounded(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(3)]
    for file in files:
        file.write_bytes(b"0" * 200_000)
    samples = content._samples(files, [200_000] * 3)
    assert len(samples) == content.SAMPLES
    assert samples[0] == (files[0], 0)
    assert samples[-1] == (files[2], 200_000 - content.BLOCK_BYTES)


def test_F1_streamed_files_on_this_machine_have_a_digest_and_random_tokens_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    data = StreamData(dataset="json", data_files=str(tmp_path / "*.jsonl"), seq_length=8)
    first = data_digest(data)
    (tmp_path / "a.jsonl").write_text('{"text": "two"}\n')
    assert None is not first != data_digest(data)
    assert data_digest(SyntheticData(seq_length=8)) is None


def test_a_tokenizer_is_its_tokenizer_json(tmp_path: Path) -> None:
    assert tokenizer_digest(None) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    first = tokenizer_digest(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert None is not first != tokenizer_digest(str(tmp_path))
