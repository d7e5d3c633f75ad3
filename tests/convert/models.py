"""Writes small random models without torch."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from sm_llm.models.config import both_spellings, normalise
from sm_llm.models.families.table import family

if TYPE_CHECKING:
    from pathlib import Path

_BASE = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama_biases": {**_BASE, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {**_BASE, "model_type": "mistral", "head_dim": 16},
    "qwen2": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 24},
}
_NAMES = {"F32": "float32", "BF16": "bfloat16"}


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random values of every tensor, fp32; norms are near one."""
    random = np.random.default_rng(seed)
    found = {}
    for name, it in family(config).tensors(config).items():
        values = random.standard_normal(it.shape, dtype=np.float32)
        found[name] = 1 + values * 0.1 if it.group == "norm" else values * 0.1
    return found


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    """Elements of ``dtype``; bf16 is cut off."""
    return values.tobytes() if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, held: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Name -> format, shape and bytes as a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    location = 0
    for name, (dtype, shape, body) in held.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [location, location + len(body)]}
        location += len(body)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(body for _, _, body in held.values()))


def write_model(folder: Path, config: dict[str, Any], dtype: str = "F32", *, files: int = 1) -> Path:
    """A Hugging Face folder: one safetensors file, or several with an index."""
    folder.mkdir()
    canonical = normalise({**config, "dtype": _NAMES[dtype]})
    (folder / "config.json").write_text(json.dumps(both_spellings(canonical), indent=2))
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    (folder / "tokenizer.json").write_text("{}")
    held = {name: (dtype, it.shape, to_bytes(it, dtype)) for name, it in tensors(canonical).items()}
    names = list(held)
    if files == 1:
        write_safetensors(folder / "model.safetensors", held)
        return folder
    index = {}
    for number in range(files):
        file = f"model.safetensors-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number::files]
        write_safetensors(folder / file, {name: held[name] for name in part})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
