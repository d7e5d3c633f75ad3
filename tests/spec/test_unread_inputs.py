"""Inputs that nothing reads are refused; a script may read any."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.loading.load import load

TASK: dict[str, Any] = {"kind": "train", "model": {"preset": "tiny"}, "max_steps": 1}
RANDOM = {"format": "synthetic", "seq_length": 16}


def rows(train: str) -> dict[str, Any]:
    return {**TASK, "data": {"format": "rows", "train": train, "seq_length": 16}}


def spec(task: dict[str, Any]) -> dict[str, Any]:
    return {"name": "x", "task": task, "inputs": {"corpus": "s3://bucket/corpus"}}


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({**TASK, "data": RANDOM}, "RANDOM TOKENS"),
        (rows("s3://bucket/corpus-2"), "does not read it"),
        ({"kind": "prepare", "sources": ["s3://bucket/texts"], "seq_length": 16}, "inputs.corpus"),
    ],
)
def test_C7_an_input_that_the_task_does_not_read_is_refused(task: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        load(spec(task), environ={})
    assert [fault.path for fault in caught.value.issues] == ["inputs.corpus"]


@pytest.mark.parametrize(
    "task",
    [
        rows("inputs.corpus"),
        rows("inputs.corpus/train"),
        rows("s3://bucket/corpus/train"),
        rows("/opt/ml/input/data/corpus/train"),
        {"kind": "script", "entry": "train.py"},
    ],
)
def test_C7_an_input_that_is_read_by_name_or_place_or_by_a_script_is_not(task: dict[str, Any]) -> None:
    load(spec(task), environ={})
