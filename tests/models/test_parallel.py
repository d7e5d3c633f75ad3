"""Parallel degrees against a model's own numbers."""

from __future__ import annotations

import pytest

from sm_llm.models.config import normalise
from sm_llm.models.families.table import FAMILIES, family
from sm_llm.models.parallel import TENSOR_PARALLEL, parallel_issues
from sm_llm.models.presets import PRESETS


def reported(name: str, **degrees: int) -> str:
    config = normalise(PRESETS[name].config)
    return "\n".join(map(str, parallel_issues(config, **{"tensor": 1, "context": 1, **degrees})))


@pytest.mark.parametrize("name", ["llama-3-8b", "mistral-7b", "qwen2.5-7b"])
def test_degrees_that_divide_heads_channels_and_vocabulary(name: str) -> None:
    assert reported(name, tensor=4, context=8) == ""


def test_each_number_that_is_not_divided_is_shown_and_the_degrees_that_work() -> None:
    text = reported("qwen2.5-0.5b", tensor=4)
    assert "num_attention_heads 14 / 4 leaves 2; num_key_value_heads 2 / 4 leaves 2" in text
    assert "Use one of 1, 2" in text
    assert "num_key_value_heads 8 / 16 leaves 8" in reported("llama-3-8b", tensor=16)


def test_every_other_family_is_refused_with_the_list() -> None:
    refused = {family(it.config).model_type: name for name, it in PRESETS.items()}
    for model_type in FAMILIES.keys() - TENSOR_PARALLEL:
        text = reported(refused[model_type], tensor=2)
        assert f"no tensor parallelism for {model_type} models" in text
        assert "llama, mistral, qwen2" in text
        assert reported(refused[model_type], context=2) == ""


def test_scalings_that_depend_on_the_longest_position_are_refused_where_sequences_are_cut() -> None:
    scaled = {**PRESETS["llama-3-8b"].config, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    (fault,) = parallel_issues(normalise(scaled), tensor=1, context=2)
    assert "dynamic rope scaling" in str(fault)
    assert parallel_issues(normalise(scaled), tensor=2, context=1) == []
