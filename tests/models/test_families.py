"""Names, shapes, initial distributions, counts and FLOPs of the families, against transformers and by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sm_llm.errors import SpecError
from sm_llm.models.config import both_spellings, misread_by_transformers_444, normalise
from sm_llm.models.families.table import FAMILIES, family
from sm_llm.models.presets import PRESETS

if TYPE_CHECKING:
    from sm_llm.models.families.family import Tensor

Configs = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def configs(variants: Configs) -> Configs:
    return {**{name: preset.config for name, preset in PRESETS.items()}, **variants}


def assert_same_tensors(configs: Configs, shapes: dict[str, dict[str, list[int]]], *, packed: bool) -> None:
    """Names, order and shapes of every model that transformers described; 4.44's are those of published files."""
    assert len(shapes) >= len(PRESETS) + 5
    for name, theirs in shapes.items():
        config = normalise(configs[name])
        named = family(config).parameters(config) if packed else family(config).tensors(config)
        ours = {key: list(tensor.shape) for key, tensor in named.items()}
        assert list(ours.items()) == list(theirs.items()), name


def test_names_shapes_and_order_are_those_of_transformers(configs: Configs, by_transformers: dict[str, Any]) -> None:
    assert_same_tensors(configs, by_transformers["shapes"], packed=True)


def test_classes_are_those_of_transformers(variants: Configs, by_transformers: dict[str, Any]) -> None:
    for name, loaded in by_transformers["loaded"].items():
        kind = family(variants[name])
        assert (kind.decoder_layer_class, kind.architecture) == (loaded["layer_class"], loaded["model_class"])


def test_initial_distribution_is_that_of_transformers(variants: Configs, by_transformers: dict[str, Any]) -> None:
    for model, moments in by_transformers["moments"].items():
        tensors = family(variants[model]).parameters(normalise(variants[model]))
        for name, (mean, std) in moments.items():
            assert_like(tensors[name], mean, std, f"{model} {name}")


def test_12f_what_a_canonical_config_leaves_out_is_known_by_the_value_in_effect(configs: Configs) -> None:
    """Stating that value changes nothing, so two configs can be compared in a field that only one of them states."""
    left_out = set()
    for name, given in configs.items():
        config = normalise(given)
        kind = family(config)
        for field in kind.fields.keys() - config.keys():
            left_out.add((kind.model_type, field))
            value = kind.in_effect(config, field)
            assert normalise({**config, field: value}) == config, (name, field, value)
    assert {("llama", "head_dim"), ("qwen2", "layer_types")} <= left_out


def assert_like(tensor: Tensor, mean: float, std: float, name: str) -> None:
    """The moments of transformers' draw are those that ``tensor`` promises, within five standard errors."""
    expected_mean = {"ones": 1.0, "zeros": 0.0, "normal": 0.0}[tensor.init]
    error = 5 * tensor.std / math.sqrt(tensor.size)
    padding = 0 if tensor.zero_row is None else 2 * tensor.std / tensor.shape[0]
    assert mean == pytest.approx(expected_mean, abs=error or 1e-9), name
    assert std == pytest.approx(tensor.std, abs=(error + padding) or 1e-9), name


def test_weights_load_without_gaps(by_transformers: dict[str, Any]) -> None:
    for name, loaded in by_transformers["loaded"].items():
        assert (loaded["missing"], loaded["unexpected"]) == ([], []), name


def test_decay_groups(variants: Configs) -> None:
    tensors = family(variants["llama-biases"]).tensors(normalise(variants["llama-biases"]))
    groups = {name.removeprefix("model.layers.0."): tensor.group for name, tensor in tensors.items()}
    assert groups["model.embed_tokens.weight"] == groups["lm_head.weight"] == "embedding"
    assert groups["self_attn.q_proj.weight"] == groups["mlp.down_proj.weight"] == "matrix"
    assert groups["self_attn.o_proj.bias"] == groups["mlp.up_proj.bias"] == "bias"
    assert groups["input_layernorm.weight"] == groups["model.norm.weight"] == "norm"


def test_a_tied_head_is_absent(variants: Configs) -> None:
    assert "lm_head.weight" not in family(variants["qwen2-tied"]).tensors(variants["qwen2-tied"])
    assert "lm_head.weight" in family(variants["qwen2"]).tensors(variants["qwen2"])


def test_padding_row_starts_at_zero_as_in_transformers(variants: Configs) -> None:
    tensors = family(variants["llama-llama3"]).tensors(variants["llama-llama3"])
    assert tensors["model.embed_tokens.weight"].zero_row == 5


def test_flops_of_llama_3_8b_by_hand() -> None:
    # 8.03e9 parameters less a 128,256 x 4,096 table; 32 layers x 4,096 channels x 8,192 tokens.
    config = PRESETS["llama-3-8b"].config
    expected = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 8192
    assert family(config).flops_per_token(config, 8192) == expected
    # Published pair: 9,037 tokens/s is 52.9% of 989 TFLOP/s.
    assert 9037 * expected / 989e12 == pytest.approx(0.529, abs=5e-4)


def test_a_tied_table_counts_in_flops_because_the_head_multiplies_by_it() -> None:
    tied, untied = PRESETS["llama-3.2-1b"].config, {**PRESETS["llama-3.2-1b"].config, "tie_word_embeddings": False}
    kind = family(tied)
    assert kind.parameter_count(untied) > kind.parameter_count(tied)
    assert kind.flops_per_token(tied, 4096) == kind.flops_per_token(untied, 4096)


def test_attention_flops_follow_heads_not_width(variants: Configs) -> None:
    kind, config = family(variants["llama-head-dim"]), variants["llama-head-dim"]
    longer = kind.flops_per_token(config, 48) - kind.flops_per_token(config, 32)
    assert longer == 12 * 2 * (4 * 32) * 16


def test_a_sliding_window_bounds_attention_flops() -> None:
    config = PRESETS["mistral-7b"].config
    kind = family(config)
    assert kind.flops_per_token(config, 4096) == kind.flops_per_token(config, 32_768)
    assert kind.flops_per_token(config, 4096) > kind.flops_per_token(config, 2048)
    unbounded = {**config, "sliding_window": None}
    assert kind.flops_per_token(unbounded, 32_768) > kind.flops_per_token(unbounded, 4096)


def test_facts_of_a_config() -> None:
    config = normalise(PRESETS["qwen2.5-7b"].config)
    kind = family(config)
    assert (kind.vocab_size(config), kind.max_position_embeddings(config), kind.head_dim(config)) == (
        152_064,
        131_072,
        128,
    )


@pytest.mark.parametrize("model_type", ["gpt2", None, 3, "Llama"])
def test_unknown_family_lists_the_known(model_type: Any) -> None:
    with pytest.raises(SpecError, match=r"task\.model: .*Supported: gpt_neox, llama, mistral, mixtral, qwen2, qwen3"):
        family({"model_type": model_type})


def test_every_family_defaults_as_transformers_does(by_transformers: dict[str, Any]) -> None:
    """Fields left out of a config.json mean the same here as there."""
    from transformers import AutoConfig

    small = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
    for model_type in FAMILIES:
        config = {"model_type": model_type, **small, "num_attention_heads": 32}
        theirs = AutoConfig.for_model(**config).to_dict()
        assert both_spellings(theirs).items() >= both_spellings(config).items(), model_type


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_transformers_444_has_the_same_tensors(configs: Configs, by_transformers_444: dict[str, Any]) -> None:
    assert by_transformers_444["version"] == "4.44.2"
    assert_same_tensors(configs, by_transformers_444["shapes"], packed=False)


@pytest.mark.integration
def test_transformers_444_computes_the_same_logits(
    variants: Configs, by_transformers: dict[str, Any], by_transformers_444: dict[str, Any]
) -> None:
    """Same theta, scaling and logits, except exactly where ``misread_by_transformers_444`` warns."""
    for name, new in by_transformers["loaded"].items():
        old = by_transformers_444["loaded"][name]
        same = "refusal" not in old and bool(np.allclose(new["logits"], old["logits"], atol=1e-5, rtol=0))
        assert same == (misread_by_transformers_444(variants[name]) == []), name
        if same:
            assert (new["theta"], new["dtype"]) == (old["theta"], old["dtype"]), name


@pytest.mark.integration
def test_configs_written_by_either_transformers_read_the_same(
    variants: Configs, by_transformers: dict[str, Any], by_transformers_444: dict[str, Any]
) -> None:
    for name, config in variants.items():
        assert normalise(by_transformers["loaded"][name]["config"]).items() >= normalise(config).items(), name
        if not misread_by_transformers_444(config):
            assert normalise(by_transformers_444["loaded"][name]["config"]).items() >= normalise(config).items(), name
