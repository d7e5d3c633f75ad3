"""A tokenizer ``org/name`` is the hub's; a reference of the same shape stays one."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.spec.loading.load import load

TASK: dict[str, Any] = {
    "kind": "train", "model": {"preset": "tiny"}, "max_steps": 1,
    "data": {"format": "rows", "train": "steps.prep.output/train", "seq_length": 16},
}  # fmt: skip
PREPARE: dict[str, Any] = {"kind": "prepare", "sources": ["/texts"], "seq_length": 16}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("steps.prep.output/tokenizer", "steps.prep.output/tokenizer"),
        ("inputs.tok/tokenizer", "inputs.tok/tokenizer"),
        ("org/name", "hf://org/name"),
    ],
)
def test_a_reference_is_not_an_address_of_the_hub(given: str, read: str) -> None:
    train: dict[str, Any] = {"task": {**TASK, "tokenizer": given}}
    if given.startswith("inputs."):
        train["inputs"] = {"tok": "s3://bucket/tok"}
    loaded = load({"name": "flow", "steps": {"prep": {"task": PREPARE}, "train": train}}, environ={})
    assert loaded.spec.steps["train"].task.tokenizer == read  # type: ignore[union-attr]


def test_E20_weights_to_start_from_are_the_hubs_like_a_tokenizer() -> None:
    job = {"name": "own", "task": {**TASK, "data": {"format": "synthetic", "seq_length": 16}}}
    for given, read in (("org/name", "hf://org/name"), ("/weights", "/weights"), ("hf://a/b@main", "hf://a/b@main")):
        loaded = load(job, [f"task.start.pretrained={given}"], environ={})
        assert loaded.spec.task.start.pretrained == read  # type: ignore[union-attr]
