"""Presets against what their authors published."""

from __future__ import annotations

import pytest

from sm_llm.errors import SpecError
from sm_llm.models.config import misread_by_transformers_444, normalise
from sm_llm.models.presets import PRESETS, preset
from sm_llm.models.registry import family

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


def test_tiny_counted_by_hand() -> None:
    attention, mlp, norms = 4 * 256 * 256, 3 * 256 * 768, 2 * 256
    assert PRESETS["tiny"].parameter_count == 4096 * 256 + 6 * (attention + mlp + norms) + 256


@pytest.mark.parametrize("name", sorted(NAMES - NOT_IN_444))
def test_every_preset_is_readable_by_old_transformers(name: str) -> None:
    assert misread_by_transformers_444(PRESETS[name].config) == []


@pytest.mark.parametrize("name", sorted(NOT_IN_444))
def test_a_family_that_old_transformers_lack_is_told(name: str) -> None:
    assert misread_by_transformers_444(PRESETS[name].config) == ["transformers 4.44 knows no qwen3 models"]


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"task\.model\.preset.*'llama-3\.2-1B'.*Did you mean llama-3\.2-1b\?"):
        preset("llama-3.2-1B")


def test_a_preset_is_not_changed_by_its_users() -> None:
    config = normalise(preset("llama-3.2-1b").config)
    config["rope_parameters"]["factor"] = 1.0
    assert normalise(preset("llama-3.2-1b").config)["rope_parameters"]["factor"] == 32.0
