"""Text to rows to a model that writes text: the worker's two tasks after one another, in this process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from worker_jobs import events, job_environment, job_file, losses, result_folder, train_task

from sm_llm.errors import CheckpointError
from sm_llm.spec.parallelism.base import Layout
from sm_llm.storage.publication.manifest import CommitManifest, FileEntry, Save
from sm_llm.worker.checkpoint.checkpoint_restore import rank_file
from sm_llm.worker.checkpoint.start_resolver import Start, _load_private
from sm_llm.worker.main import main
from sm_llm.worker.results.sample import harmless

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "the cat sat on the mat and the dog ran to the cat and sat there too so they ate some fish"
WORDS = TEXT.split()


def prepare(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number:02d}.txt").write_text(" ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(200)))
    task = {
        "kind": "prepare",
        "sources": [str(text)],
        "seq_length": 32,
        "validation_fraction": 0.2,
        "train_tokenizer": {"vocab_size": 270},
    }
    assert main("prepare", job_environment(job_file(task, tmp_path / "rows", 1))) == 0
    return result_folder(tmp_path / "rows")


def test_a_model_of_prepared_text_is_published_with_its_tokenizer_and_writes_a_sample(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows, run = prepare(tmp_path), tmp_path / "model"
    task = train_task(
        model={
            "config": {
                "vocab_size": 270,
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            }
        },
        data={"format": "rows", "seq_length": 32, "train": str(rows / "train"), "validation": str(rows / "validation")},
        tokenizer=str(rows / "tokenizer"),
        optim={"learning_rate": 2e-2},
        max_steps=30,
        logging={"sample_prompt": "the cat", "sample_tokens": 8},
    )
    assert main("train", job_environment(job_file(task, run, 1))) == 0
    assert losses(run)[30] < losses(run)[1] - 1
    sample = events(run, "sample")[0]
    assert sample["prompt"] == "the cat"
    assert sample["text"]
    folder = result_folder(run)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    written = model.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=4)
    assert written.shape[1] > 2


def test_a_published_run_is_not_trained_again(tmp_path: Path) -> None:
    run = tmp_path / "model"
    task = train_task(max_steps=4)
    assert main("train", job_environment(job_file(task, run, 1))) == 0
    assert main("train", job_environment(job_file(task, run, 1, attempt=2))) == 0
    assert [event["attempt"] for event in events(run, "nothing_done")] == [2]
    assert len(events(run, "start_chosen")) == 1


@pytest.mark.parametrize(
    ("layout", "reported"),
    [
        (Layout(), "world_size 2 -> 1, data_parallel_degree 2 -> 1"),
        (Layout(tensor=2), "data_parallel_degree 2 -> 1, shard_degree 2 -> 1, tensor_parallel_degree 1 -> 2"),
    ],
)
def test_a_stream_is_not_continued_by_processes_that_are_arranged_otherwise(
    layout: Layout, reported: str, tmp_path: Path
) -> None:
    (tmp_path / rank_file(0)).write_text(json.dumps({"random": {}, "stream": {"rows": 3}}))
    save = Save(run_id="run", step=4, save_id="0" * 32, world_size=2, node_count=1)
    meta = {"job": Layout(shard=2).degrees()}
    one = FileEntry(path="a", size=1, crc64nvme="0" * 16)
    commit = CommitManifest(save=save, nonce="0" * 32, time=0.0, files=(one,), meta=meta)
    environ = job_environment(job_file(train_task(), tmp_path / "run", 1))
    from sm_llm.worker.context import WorkerContext

    start = Start("checkpoint", 4, "somewhere", "digest", commit, tmp_path)
    with pytest.raises(CheckpointError, match=reported):
        _load_private(WorkerContext.read(environ), start, Mock(layout=layout))


def test_a_sample_holds_nothing_that_a_terminal_obeys() -> None:
    assert (
        harmless("a\x1b[2J\x07b\n\tç漢 \x00")
        == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b\n\tç漢 \N{REPLACEMENT CHARACTER}"
    )
