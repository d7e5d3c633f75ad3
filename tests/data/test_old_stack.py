"""Prepared data in the stack of the SMP image: datasets 2.19, transformers 4.44, numpy 1, installed beside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures.old_stack import PINS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


def read(job: dict[str, Any], site: Path | None = None) -> dict[str, Any]:
    path = os.pathsep.join(str(part) for part in (site, ROOT) if part)
    program = [sys.executable, str(Path(__file__).parent / "read_data.py")]
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(program, env=environment, input=json.dumps(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_both_stacks_read_the_same(
    tmp_path: Path,
    run_prepare: Callable[..., Any],
    write_jsonl: Callable[..., Path],
    texts: list[str],
    old_stack: Path,
) -> None:
    source = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    run_prepare(
        source,
        tokenizer=None,
        train_tokenizer={"vocab_size": 400},
        validation_fraction=0.1,
        tail="pad",
        rows_per_shard=300,
    )
    (tmp_path / "lines").mkdir()
    lines = [{"input_ids": [n, 1, 2, 3, 4, 5], "attention_mask": [1, 1, 1, 1, 1, 0]} for n in range(60)]
    write_jsonl(tmp_path / "lines" / "a.json", lines)
    job = {"out": str(tmp_path / "out"), "json": str(tmp_path / "lines"), "text": str(source), "texts": texts[:50]}
    new = read({**job, "scratch": str(tmp_path / "new"), "legs": [60]})
    old = read({**job, "scratch": str(tmp_path / "old"), "legs": [7, 30, 23]}, old_stack)
    assert old.pop("versions") == PINS
    assert new.pop("versions")["datasets"].startswith("5.")
    assert old == new
    assert {"input_ids", "labels", "attention_mask"} == set(old["rows"])
