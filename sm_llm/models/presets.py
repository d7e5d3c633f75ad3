"""Built-in architectures for training from scratch, as their authors published them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from sm_llm.errors import Issue, SpecError


@dataclass(frozen=True)
class Preset:
    """An architecture: its Hugging Face config, the parameter count its authors published, and where."""

    name: str
    config: dict[str, Any]
    parameter_count: int
    source: str


def _llama_2(hidden: int, inner: int, layers: int, heads: int, keys: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _llama_3(hidden: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **_llama_2(hidden, inner, layers, heads, 8),
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    }


def _llama_3_1(hidden: int, inner: int, layers: int, heads: int, factor: float = 8.0) -> dict[str, Any]:
    return {
        **_llama_3(hidden, inner, layers, heads),
        "max_position_embeddings": 131_072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def _llama_3_2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {**_llama_3_1(hidden, 8192, layers, heads, factor=32.0), "tie_word_embeddings": True}


def _qwen_2_5(hidden: int, inner: int, layers: int, heads: int, keys: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": 32_768,
        "max_window_layers": layers,
        "sliding_window": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "bos_token_id": 151_643,
        "eos_token_id": 151_643,
    }


_TINY = {
    **_llama_2(hidden=256, inner=768, layers=6, heads=4, keys=4),
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    # The tokenizer is trained with the data, so its ids are not known here.
    "bos_token_id": None,
    "eos_token_id": None,
}

_MISTRAL_7B = {
    "model_type": "mistral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MIXTRAL_8X7B = {
    **_MISTRAL_7B,
    "model_type": "mixtral",
    "sliding_window": None,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

_GPT_NEOX_20B = {
    "model_type": "gpt_neox",
    "vocab_size": 50_432,
    "hidden_size": 6144,
    "intermediate_size": 24_576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu_fast",
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "rope_theta": 10_000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _qwen_3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        **_qwen_2_5(hidden, inner, layers, heads, 8),
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
    }


_QWEN_0_5B = {**_qwen_2_5(896, 4864, 24, 14, 2), "tie_word_embeddings": True}
_QWEN_7B = {
    **_qwen_2_5(3584, 18_944, 28, 28, 4),
    "vocab_size": 152_064,
    "max_position_embeddings": 131_072,
    "sliding_window": 131_072,
}

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("tiny", _TINY, 6_163_712, "made here for the tiny-local recipe; counted by hand"),
        Preset("llama-2-7b", _llama_2(4096, 11_008, 32, 32, 32), 6_738_415_616, "meta-llama/Llama-2-7b-hf"),
        Preset("llama-2-13b", _llama_2(5120, 13_824, 40, 40, 40), 13_015_864_320, "meta-llama/Llama-2-13b-hf"),
        Preset("llama-2-70b", _llama_2(8192, 28_672, 80, 64, 8), 68_976_648_192, "meta-llama/Llama-2-70b-hf"),
        Preset("llama-3-8b", _llama_3(4096, 14_336, 32, 32), 8_030_261_248, "meta-llama/Meta-Llama-3-8B"),
        Preset("llama-3-70b", _llama_3(8192, 28_672, 80, 64), 70_553_706_496, "meta-llama/Meta-Llama-3-70B"),
        Preset("llama-3.1-8b", _llama_3_1(4096, 14_336, 32, 32), 8_030_261_248, "meta-llama/Llama-3.1-8B"),
        Preset("llama-3.1-70b", _llama_3_1(8192, 28_672, 80, 64), 70_553_706_496, "meta-llama/Llama-3.1-70B"),
        Preset("llama-3.2-1b", _llama_3_2(2048, 16, 32), 1_235_814_400, "meta-llama/Llama-3.2-1B"),
        Preset("llama-3.2-3b", _llama_3_2(3072, 28, 24), 3_212_749_824, "meta-llama/Llama-3.2-3B"),
        Preset("mistral-7b", _MISTRAL_7B, 7_241_732_096, "mistralai/Mistral-7B-v0.1"),
        Preset("qwen2.5-0.5b", _QWEN_0_5B, 494_032_768, "Qwen/Qwen2.5-0.5B"),
        Preset("qwen2.5-7b", _QWEN_7B, 7_615_616_512, "Qwen/Qwen2.5-7B"),
        Preset("qwen3-0.6b", _qwen_3(1024, 3072, 28, 16, tied=True), 596_049_920, "Qwen/Qwen3-0.6B"),
        Preset("qwen3-8b", _qwen_3(4096, 12_288, 36, 32), 8_190_735_360, "Qwen/Qwen3-8B"),
        Preset("qwen3-32b", _qwen_3(5120, 25_600, 64, 64), 32_762_123_264, "Qwen/Qwen3-32B"),
        Preset("mixtral-8x7b", _MIXTRAL_8X7B, 46_702_792_704, "mistralai/Mixtral-8x7B-v0.1"),
        Preset("gpt-neox-20b", _GPT_NEOX_20B, 20_554_567_680, "EleutherAI/gpt-neox-20b"),
    )
}
"""By name. ``source`` is the model's page on the Hugging Face hub, whose weight files state the count."""


def preset(name: str) -> Preset:
    """The preset of that name; raises ``SpecError`` with the nearest one."""
    if name in PRESETS:
        return PRESETS[name]
    near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    remedy = f"{hint}Presets: {', '.join(PRESETS)}."
    raise SpecError([Issue("preset-unknown", "task.model.preset", "is not a built-in model", name, remedy)])
