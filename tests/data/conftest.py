"""A small corpus, a tokenizer trained on it and a prepare that needs no run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.data.prepare.prepare_rows import prepare
from sm_llm.data.prepare.train_tokenizer import train_tokenizer
from sm_llm.data.rows import RowsFolder
from sm_llm.spec.tasks import PrepareTask

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "naïve", "café", "owners", "paid", "1,234.50", "€", "for", "tea"]
WORDS += ["—", "你好", "🙂", "\t\n"]


@pytest.fixture(scope="session")
def make_texts() -> Callable[..., list[str]]:
    """``make_texts(count, seed)``: different short texts of real-looking words."""

    def make(count: int, seed: int = 0, longest: int = 120) -> list[str]:
        random = np.random.default_rng(seed)
        return [" ".join(random.choice(WORDS, random.integers(1, longest))) + f" #{n}" for n in range(count)]

    return make


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, list[Any]], Path]:
    """``write_jsonl(path, rows)``: one JSON value per line."""

    def write(path: Path, rows: list[Any]) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def all_ids() -> Callable[[Path], Any]:
    """``all_ids(folder)``: every token of a rows folder in order."""

    def read(folder: Path) -> Any:
        rows = RowsFolder.open(folder)
        return rows.take(np.arange(len(rows)))["input_ids"].ravel()

    return read


@pytest.fixture(scope="session")
def texts(make_texts: Callable[..., list[str]]) -> list[str]:
    return make_texts(300)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """A folder with a byte-level BPE of 400 entries; the end token has id 0."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(texts), folder, 400, "<|endoftext|>")
    return folder


@pytest.fixture
def run_prepare(tmp_path: Path, tokenizer: Path) -> Callable[..., dict[str, Any]]:
    """``run_prepare(source, ..., **fields)`` writes to ``tmp_path/out``, by default with the small tokenizer."""

    def run(*sources: Path | str, output: str = "out", **fields: Any) -> dict[str, Any]:
        progress = fields.pop("progress", lambda _: None)
        fields = {"seq_length": 16, "tokenizer": str(tokenizer), **fields}
        task = PrepareTask(sources=[str(source) for source in sources], **fields)
        return prepare(task, tmp_path / output, progress)

    return run
