"""Small models of every family as folders, and what installed and older transformers make of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from sm_llm.models.config import both_spellings, misread_by_transformers_444, normalise
from sm_llm.models.families.table import family
from sm_llm.models.init_weights import initial_slice
from sm_llm.models.presets import PRESETS

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Wide, so that positions matter to the logits.
    "initializer_range": 0.2,
    "dtype": "float32",
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-theta": {"model_type": "llama", "rope_theta": 777.0, "num_key_value_heads": 4},
    "llama-llama3": {
        "model_type": "llama",
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA_3,
        "tie_word_embeddings": True,
        "pad_token_id": 5,
    },
    "llama-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4}},
    "llama-dynamic": {
        "model_type": "llama",
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 8,
    },
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"model_type": "llama", "head_dim": 32},
    "llama-yarn": {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "llama-yarn-length": {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "mistral": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
    "mistral-window": {"model_type": "mistral", "sliding_window": 5, "head_dim": 32},
    "mistral-linear": {"model_type": "mistral", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2-linear": {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
    "qwen3-biases": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral-window": {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": 5},
    "gpt-neox": {"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 777.0},
    "gpt-neox-serial": {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False},
    "gpt-neox-linear": {"model_type": "gpt_neox", "rope_scaling": {"type": "linear", "factor": 4.0}},
}


def variant(name: str) -> dict[str, Any]:
    """The whole config of a small model."""
    return {**SMALL, **VARIANTS[name]}


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder with our config, names and initial weights; made without torch."""
    folder.mkdir(parents=True)
    tensors = family(config).tensors(normalise(config))
    weights = {
        name: initial_slice(1, name, tensor.shape, tensor, [0] * len(tensor.shape), tensor.shape)
        for name, tensor in tensors.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(both_spellings(config)))


def describe(folder: Path, site: str | None = None) -> dict[str, Any]:
    """Run ``describe_models.py`` over the small models and all presets; ``site`` is put on PYTHONPATH."""
    small = {name: variant(name) for name in VARIANTS}
    for name, config in small.items():
        write_model(folder / name, config)
    presets = {name: preset.config for name, preset in PRESETS.items()}
    meta, readable = (
        {name: both_spellings(it) for name, it in configs.items() if not (site and misread_by_transformers_444(it))}
        for configs in ({**presets, **small}, small)
    )
    job = {
        "meta": meta,
        "moments": readable,
        "folders": {name: str(folder / name) for name in small},
    }
    (folder / "job.json").write_text(json.dumps(job))
    program = Path(__file__).parent / "describe_models.py"
    environment = {**os.environ, **({"PYTHONPATH": site} if site else {})}
    command = [sys.executable, str(program), str(folder / "job.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="session")
def variants() -> dict[str, dict[str, Any]]:
    """Small configs by name, in every feature and spelling."""
    return {name: variant(name) for name in VARIANTS}


@pytest.fixture(scope="session")
def by_transformers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the installed transformers makes of presets and small models."""
    return describe(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def by_transformers_444(tmp_path_factory: pytest.TempPathFactory, old_stack: Path) -> dict[str, Any]:
    """The same by transformers 4.44.2, installed beside."""
    return describe(tmp_path_factory.mktemp("models-444"), str(old_stack))
