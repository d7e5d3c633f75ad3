"""The canonical config, both spellings of it, and what may be overridden."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.models.config import both_spellings, misread_by_transformers_444, model_config, normalise, override
from sm_llm.models.families.family import ACTIVATIONS
from sm_llm.models.presets import PRESETS, preset

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def faults(error: pytest.ExceptionInfo[SpecError]) -> dict[str, str]:
    """Faults by path without the common prefix."""
    return {fault.path.removeprefix("task.model.config."): str(fault) for fault in error.value.issues}


def test_both_spellings_of_rope_read_the_same() -> None:
    old = normalise({**LLAMA, "rope_theta": 5e5, "rope_scaling": SCALING, "torch_dtype": "bfloat16"})
    new = normalise({**LLAMA, "rope_parameters": {**SCALING, "rope_theta": 500_000}, "dtype": "torch.bfloat16"})
    assert old == new
    assert new["rope_parameters"] == {**SCALING, "rope_theta": 500_000.0}
    assert new["dtype"] == "bfloat16"
    assert not {"rope_theta", "rope_scaling", "torch_dtype"} & new.keys()


def test_published_config_carries_every_value_under_both_names() -> None:
    published = both_spellings({**LLAMA, "rope_theta": 777, "rope_scaling": SCALING, "dtype": "float32"})
    assert published["rope_theta"] == published["rope_parameters"]["rope_theta"] == 777.0
    assert published["rope_scaling"] == SCALING
    assert published["rope_parameters"] == {**SCALING, "rope_theta": 777.0}
    assert published["dtype"] == published["torch_dtype"] == "float32"


def test_unscaled_rope_is_null_for_old_readers() -> None:
    published = both_spellings(LLAMA)
    assert published["rope_scaling"] is None
    assert published["rope_theta"] == 10_000.0
    assert published["rope_parameters"] == {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_normalising_is_idempotent(name: str) -> None:
    config = normalise(PRESETS[name].config)
    assert normalise(config) == normalise(both_spellings(config)) == config
    assert json.loads(json.dumps(both_spellings(config))) == both_spellings(config)


def test_old_name_of_the_rope_type_and_integers() -> None:
    found = normalise({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4}})["rope_parameters"]
    assert found == {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    assert isinstance(found["factor"], float)


def test_original_length_defaults_to_the_longest_sequence() -> None:
    scaling = {key: value for key, value in SCALING.items() if key != "original_max_position_embeddings"}
    found = normalise({**LLAMA, "rope_scaling": scaling, "max_position_embeddings": 64})
    assert found["rope_parameters"]["original_max_position_embeddings"] == 64


def test_facts_about_the_folder_are_forgotten_and_foreign_fields_kept() -> None:
    found = normalise({**LLAMA, "_name_or_path": "x", "transformers_version": "4.1", "auto_map": {}, "max_length": 20})
    assert found["max_length"] == 20
    assert not {"_name_or_path", "transformers_version", "auto_map"} & found.keys()


def test_derived_head_size_is_not_stored_but_a_real_one_is() -> None:
    assert "head_dim" not in normalise({**LLAMA, "head_dim": 16})
    assert "head_dim" not in normalise({**LLAMA, "head_dim": None})
    assert normalise({**LLAMA, "head_dim": 32})["head_dim"] == 32


def test_explicit_null_is_not_an_absent_field() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "num_attention_heads": 16}
    assert normalise(mistral)["sliding_window"] == 4096
    assert normalise({**mistral, "sliding_window": None})["sliding_window"] is None
    assert normalise(mistral)["num_key_value_heads"] == 8
    assert normalise({**mistral, "num_key_value_heads": None})["num_key_value_heads"] == 16


def test_all_faults_of_a_config_at_once() -> None:
    broken = {
        **{key: value for key, value in LLAMA.items() if key != "vocab_size"},
        "hidden_size": "64",
        "num_hidden_layers": 0,
        "tie_word_embeddings": 1,
        "attention_dropout": True,
        "initializer_range": -0.1,
        "bos_token_id": [1],
        "rope_scaling": {"rope_type": "llama3", "factor": 0.5, "low_freq_factor": "1", "high": 4},
        "torch_dtype": "int8",
        "architectures": ["LlamaForSequenceClassification"],
        "quantization_config": {"quant_method": "gptq"},
    }
    with pytest.raises(SpecError) as error:
        normalise(broken)
    found = faults(error)
    assert "is missing" in found["vocab_size"]
    assert "must be an integer (got '64')" in found["hidden_size"]
    assert "at least 1 (got 0)" in found["num_hidden_layers"]
    assert "must be true or false (got 1)" in found["tie_word_embeddings"]
    assert "must be a number (got True)" in found["attention_dropout"]
    assert "at least 0" in found["initializer_range"]
    assert "must be an integer or null" in found["bos_token_id"]
    assert "at least 1" in found["rope_scaling.factor"]
    assert "must be a finite number" in found["rope_scaling.low_freq_factor"]
    assert "is missing" in found["rope_scaling.high_freq_factor"]
    assert "is unknown for rope_type llama3" in found["rope_scaling.high"]
    assert "float32" in found["dtype"]
    assert "LlamaForCausalLM" in found["architectures"]
    assert "quantised" in found["quantization_config"]


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"hidden_size": 66}, "hidden_size", "multiple of num_attention_heads (4)"),
        ({"num_key_value_heads": 3}, "num_attention_heads", "multiple of num_key_value_heads (3)"),
        ({"head_dim": 15}, "head_dim", "even head size"),
        ({"pad_token_id": 96}, "pad_token_id", "below vocab_size (96)"),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}}, "rope_theta", "two spellings"),
        ({"rope_theta": "1e4"}, "rope_theta", "positive number"),
        ({"rope_scaling": SCALING, "rope_parameters": {**SCALING, "factor": 2.0}}, "rope_scaling", "contradicts"),
        ({"rope_scaling": [1]}, "rope_scaling", "must be a map or null"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_scaling.rope_type", "Known: default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": 1}}, "rope_scaling.truncate", "true or false"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor", "unknown"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype", "contradicts torch_dtype"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window", "not supported for qwen2"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], path: str, message: str) -> None:
    base = {**LLAMA, "num_key_value_heads": 2}
    with pytest.raises(SpecError) as error:
        normalise({**base, **change})
    assert message in faults(error)[path]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_rotary_numbers_that_are_not_finite_are_refused(value: str) -> None:
    number = json.loads(value)
    longrope = {"rope_type": "longrope", "short_factor": [1.0, number], "long_factor": [1.0, 2.0]}
    for change, path, message in (
        ({"rope_theta": number}, "rope_theta", "must be a finite positive number"),
        ({"rope_parameters": {"rope_theta": number}}, "rope_theta", "must be a finite positive number"),
        ({"rope_scaling": {**SCALING, "factor": number}}, "rope_scaling.factor", "must be a finite number"),
        ({"rope_scaling": longrope}, "rope_scaling.short_factor", "must be a list of finite numbers"),
    ):
        with pytest.raises(SpecError) as error:
            normalise({**LLAMA, **change})
        assert message in faults(error)[path]


def test_override_any_field_from_scratch() -> None:
    found = override(LLAMA, {"num_hidden_layers": 3, "head_dim": 8, "tie_word_embeddings": True}, pretrained=False)
    assert (found["num_hidden_layers"], found["head_dim"], found["tie_word_embeddings"]) == (3, 8, True)


def test_head_size_follows_an_overridden_width() -> None:
    found = override({**LLAMA, "head_dim": 16}, {"hidden_size": 32, "head_dim": None}, pretrained=False)
    assert "head_dim" not in found
    assert "head_dim" not in override(normalise({**LLAMA, "head_dim": 16}), {"hidden_size": 32}, pretrained=False)


def test_unknown_fields_name_the_nearest_all_at_once() -> None:
    with pytest.raises(SpecError) as error:
        override(LLAMA, {"num_hidden_layer": 3, "sliding_window": 3, "zzz": 1}, pretrained=False)
    found = faults(error)
    assert "Did you mean num_hidden_layers?" in found["num_hidden_layer"]
    assert "not a config field of llama models" in found["sliding_window"]
    assert "Fields: architectures, attention_bias" in found["zzz"]


def test_pretrained_weights_take_safe_fields_only() -> None:
    safe = {"rope_theta": 5e5, "attention_dropout": 0.1, "max_position_embeddings": 4096, "use_cache": False}
    found = override(LLAMA, safe, pretrained=True)
    assert found["rope_parameters"]["rope_theta"] == 5e5
    assert found["max_position_embeddings"] == 4096
    with pytest.raises(SpecError) as error:
        override(LLAMA, {"hidden_size": 32, "tie_word_embeddings": True, "architectures": ["X"]}, pretrained=True)
    assert set(faults(error)) == {"hidden_size", "tie_word_embeddings", "architectures"}
    assert "These can: attention_dropout" in faults(error)["hidden_size"]


def test_repeating_a_pretrained_value_is_fine() -> None:
    assert override(LLAMA, {"hidden_size": 64, "rms_norm_eps": 1e-6}, pretrained=True) == normalise(LLAMA)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_theta": 1e6}, {**SCALING, "rope_theta": 1e6}),
        ({"rope_scaling": {"factor": 16}}, {**SCALING, "factor": 16.0, "rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 1e6}}, {**SCALING, "rope_theta": 1e6}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 1e4}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
    ],
)
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_override_rope_in_any_spelling(overrides: dict[str, Any], expected: dict[str, Any], spelling: str) -> None:
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": SCALING}
    base = old if spelling == "old" else normalise(old)
    for pretrained in (False, True):
        assert override(base, overrides, pretrained)["rope_parameters"] == expected


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_overriding_rope_with_nonsense(name: str) -> None:
    with pytest.raises(SpecError) as error:
        override(LLAMA, {name: 3}, pretrained=False)
    assert "must be a map or null (got 3)" in faults(error)[name]


def test_a_key_of_rope_without_a_value_is_refused_where_no_scaling_has_it() -> None:
    """As YAML reads ``{rope_type:linear,factor:2.0}``, whose spaces were forgotten."""
    with pytest.raises(SpecError) as error:
        override(LLAMA, {"rope_scaling": {"rope_type:linear": None, "factor:2.0": None}}, pretrained=False)
    assert "is unknown for rope_type default (got None)" in faults(error)["rope_scaling.factor:2.0"]


def test_override_number_format_by_either_name() -> None:
    base = {**LLAMA, "torch_dtype": "float16"}
    assert override(base, {"dtype": "bfloat16"}, pretrained=True)["dtype"] == "bfloat16"
    assert override(normalise(base), {"torch_dtype": "float32"}, pretrained=True)["dtype"] == "float32"


def test_overrides_do_not_change_their_base() -> None:
    base = {**LLAMA, "rope_scaling": dict(SCALING)}
    before = json.dumps(base)
    override(base, {"rope_scaling": {"factor": 2.0}, "hidden_size": 32}, pretrained=False)["rope_parameters"].clear()
    assert json.dumps(base) == before


def test_old_readers_are_warned_about_what_they_misread() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 2}
    assert (
        "ignores the linear"
        in misread_by_transformers_444({**mistral, "rope_scaling": {"type": "linear", "factor": 2}})[0]
    )
    assert "head_dim" in misread_by_transformers_444({**LLAMA, "head_dim": 32})[0]
    assert misread_by_transformers_444({**mistral, "head_dim": 32}) == []


def test_model_config_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    folder = str(tmp_path)
    wider = {"hidden_size": 128}
    assert model_config(preset=None, path=folder, pretrained=None, overrides=wider)["hidden_size"] == 128
    assert model_config(preset="tiny", path=None, pretrained=None, overrides={})["vocab_size"] == 4096
    assert model_config(preset=None, path=None, pretrained=folder, overrides={}) == normalise(LLAMA)
    with pytest.raises(SpecError, match="pretrained weights"):
        model_config(preset=None, path=None, pretrained=folder, overrides=wider)
    with pytest.raises(SpecError, match=r"pretrained weights"):
        model_config(preset=None, path=folder, pretrained=folder, overrides=wider)
    with pytest.raises(SpecError, match="names no model"):
        model_config(preset=None, path=None, pretrained=None, overrides={})
    with pytest.raises(SpecError, match=r"task\.start\.pretrained"):
        model_config(preset=None, path=None, pretrained=str(tmp_path / "absent"), overrides={})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attention_dropout", 1, "less than 1"),
        ("attention_dropout", 5.0, "less than 1"),
        ("hidden_act", "banana", "is not an activation function"),
        ("initializer_range", 1e9, "at most 1"),
        ("rms_norm_eps", 5, "at most 1"),
        ("bos_token_id", 999_999, "below vocab_size"),
        ("eos_token_id", [2, 999_999], "below vocab_size"),
        ("eos_token_id", [2, "x"], "must be whole numbers"),
    ],
)
def test_S12_06_values_that_mean_nothing_are_refused_by_name(name: str, value: Any, words: str) -> None:
    with pytest.raises(SpecError, match=rf"task\.model\.config\.{name}: .*{words}"):
        override(preset("tiny").config, {name: value}, pretrained=False)


def test_S12_06_a_smaller_vocabulary_keeps_the_ids_of_a_preset() -> None:
    assert override(preset("llama-3-8b").config, {"vocab_size": 300}, pretrained=False)["bos_token_id"] >= 300


def test_the_activation_functions_are_those_of_transformers() -> None:
    from transformers.activations import ACT2FN

    assert set(ACTIVATIONS) <= set(ACT2FN)
