"""Presets against what their authors published."""

from __future__ import annotations

import pytest

from sm_llm.errors import SpecError
from sm_llm.models.config import misread_by_transformers_444, normalise
from sm_llm.models.families.table import family
from sm_llm.models.presets import PRESETS, preset

NAMES = {
    "tiny",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "mistral-7b",
    "qwen2.5-0.5b",
    "qwen2.5-7b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-32b",
    "mixtral-8x7b",
    "gpt-neox-20b",
}
NOT_IN_444 = {"qwen3-0.6b", "qwen3-8b", "qwen3-32b"}


def test_the_promised_presets_exist() -> None:
    assert set(PRESETS) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_parameter_count_is_the_published_one(name: str) -> None:
    config = normalise(PRESETS[name].config)
    assert family(config).parameter_count(config) == PRESETS[name].parameter_count


PUBLISHED = {
    "llama-2-7b": (32, 32, 10_000, 4096, None),
    "llama-2-13b": (40, 40, 10_000, 4096, None),
    "llama-2-70b": (64, 8, 10_000, 4096, None),
    "llama-3-8b": (32, 8, 500_000, 8192, None),
    "llama-3-70b": (64, 8, 500_000, 8192, None),
    "llama-3.1-8b": (32, 8, 500_000, 131_072, None),
    "llama-3.1-70b": (64, 8, 500_000, 131_072, None),
    "llama-3.2-1b": (32, 8, 500_000, 131_072, None),
    "llama-3.2-3b": (24, 8, 500_000, 131_072, None),
    "mistral-7b": (32, 8, 10_000, 32_768, 4096),
    "mixtral-8x7b": (32, 8, 1_000_000, 32_768, None),
    "qwen2.5-0.5b": (14, 2, 1_000_000, 32_768, None),
    "qwen2.5-7b": (28, 4, 1_000_000, 131_072, None),
    "qwen3-0.6b": (16, 8, 1_000_000, 40_960, None),
    "qwen3-8b": (32, 8, 1_000_000, 40_960, None),
    "qwen3-32b": (64, 8, 1_000_000, 40_960, None),
    "gpt-neox-20b": (64, None, 10_000, 2048, None),
}
"""Query heads, key/value heads, rotary base, longest sequence and window of the published configs: none of them shows
in a number of parameters."""


@pytest.mark.parametrize("name", sorted(NAMES - {"tiny"}))
def test_heads_and_positions_are_the_published_ones(name: str) -> None:
    config = normalise(PRESETS[name].config)
    found = [config.get(field) for field in ("num_attention_heads", "num_key_value_heads")]
    found += [config["rope_parameters"]["rope_theta"], config["max_position_embeddings"], config.get("sliding_window")]
    assert tuple(found) == PUBLISHED[name]


@pytest.mark.parametrize(("names", "factor"), [(("llama-3.1-8b", "llama-3.1-70b"), 8), (("llama-3.2-1b",), 32)])
def test_llama_3_1_and_later_scale_their_positions(names: tuple[str, ...], factor: int) -> None:
    for name in names:
        scaling = normalise(PRESETS[name].config)["rope_parameters"]
        assert scaling.pop("rope_theta") == 500_000
        assert scaling == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        }
    assert normalise(PRESETS["gpt-neox-20b"].config)["rotary_pct"] == 0.25


def test_tiny_counted_by_hand() -> None:
    attention, mlp, norms = 4 * 256 * 256, 3 * 256 * 768, 2 * 256
    assert PRESETS["tiny"].parameter_count == 4096 * 256 + 6 * (attention + mlp + norms) + 256


@pytest.mark.parametrize("name", sorted(NAMES - NOT_IN_444))
def test_every_preset_is_readable_by_old_transformers(name: str) -> None:
    assert misread_by_transformers_444(PRESETS[name].config) == []


@pytest.mark.parametrize("name", sorted(NOT_IN_444))
def test_a_family_that_old_transformers_lack_is_reported(name: str) -> None:
    assert misread_by_transformers_444(PRESETS[name].config) == ["transformers 4.44 knows no qwen3 models"]


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"task\.model\.preset.*'llama-3\.2-1B'.*Did you mean llama-3\.2-1b\?"):
        preset("llama-3.2-1B")


def test_a_preset_is_not_changed_by_its_users() -> None:
    config = normalise(preset("llama-3.2-1b").config)
    config["rope_parameters"]["factor"] = 1.0
    assert normalise(preset("llama-3.2-1b").config)["rope_parameters"]["factor"] == 32.0
