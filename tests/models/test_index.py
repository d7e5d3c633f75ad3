"""The index of a model's files is data that somebody else wrote."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from sm_llm.models.safetensors_folder import INDEX_FILE, stored_tensors
from tests.fixtures.foreign import alterations
from tests.fixtures.sampling import number

if TYPE_CHECKING:
    from pathlib import Path

WHOLE = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}


@pytest.mark.parametrize(
    "name", [".", "..", "../x", "/x", "a\\b", "C:/x", "a\x00b", "a\x1b[2J", "x" * 5000, "\uff0e\uff0e/x", "CON", "a//b"]
)
def test_A13_21_a_file_of_the_index_is_a_name_below_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": name}}))
    tensors, faults = stored_tensors(tmp_path)
    assert tensors == {}
    assert "names files outside of its folder, or by names that no file has" in faults[0].message


@pytest.mark.parametrize(
    "text",
    ['{"metadata": {"total_size": 1e999}, "weight_map": {"a": "b"}}', '{"metadata": [1], "weight_map": {"a": "b"}}',
     '{"metadata": "x", "weight_map": {"a": "b"}}', '{"weight_map": []}', "[]", "", "[" * 100_000],
)  # fmt: skip
def test_A13_21_an_index_that_is_none_is_a_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    tensors, faults = stored_tensors(tmp_path)
    assert tensors == {}
    assert "is not a usable index" in faults[0].message


@settings(max_examples=number(200, whole=2000))
@given(alterations(WHOLE))
def test_A13_21_whatever_an_index_holds_is_a_fault_in_words(tmp_path: Path, content: Any) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(content))
    assert stored_tensors(tmp_path)[1]
