"""Writes the trained model as a Hugging Face folder, one tensor in memory at a time and one shard file at most."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.errors import DataError
from sm_llm.models.config import both_spellings
from sm_llm.models.families.table import family
from sm_llm.models.safetensors_folder import INDEX_FILE, SINGLE_FILE, TOKENIZER_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.worker.strategies.base import Strategy

# One file is held in host memory until it is written.
SHARD_BYTES = 4 * 2**30
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(
    strategy: Strategy,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    tokenizer: Path | None,
    folder: Path,
    *,
    is_leader: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, config (both spellings), generation config and tokenizer to ``folder``. A collective.

    Only the leader writes. ``shard_bytes`` bounds a safetensors file and, with one tensor, the host memory needed.
    """
    plan = _ShardPlan(config, dtype, shard_bytes)
    if is_leader:
        folder.mkdir(parents=True)
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in strategy.export_weights():
        if is_leader:
            pending[name] = tensor.contiguous()
            # A file is written once all of its tensors are here, in whichever order the strategy gives them.
            if (names := plan.names_with(name)) <= pending.keys():
                _write_shard(folder / plan.files[name], {it: pending.pop(it) for it in sorted(names)})
    if is_leader:
        plan.write_index(folder)
        write_configs(folder, config, dtype, tokenizer)


class _ShardPlan:
    """Which tensor goes to which file, known before the first one is gathered (file names hold the shard count)."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, shard_bytes: int) -> None:
        sizes = {name: tensor.size * dtype.itemsize for name, tensor in family(config).tensors(config).items()}
        self.total_size = sum(sizes.values())
        shards: list[list[str]] = [[]]
        filled = 0
        for name, size in sizes.items():
            # A tensor is never split, so one that is larger than the bound has a file of its own.
            if filled and filled + size > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += size
        count = len(shards)
        self.files: dict[str, str] = {}
        self._names: dict[str, set[str]] = {}
        for number, names in enumerate(shards, start=1):
            file = SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self.files.update(dict.fromkeys(names, file))
            self._names[file] = set(names)

    def names_with(self, name: str) -> set[str]:
        """All names of the shard that holds ``name``."""
        return self._names[self.files[name]]

    def write_index(self, folder: Path) -> None:
        if len(self._names) > 1:
            index = {"metadata": {"total_size": self.total_size}, "weight_map": self.files}
            _write_json(folder / INDEX_FILE, index)


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    # transformers reads the framework from the metadata.
    save_file(tensors, path, metadata={"format": "pt"})


def write_configs(folder: Path, config: Mapping[str, Any], dtype: torch.dtype, tokenizer: Path | None) -> None:
    """Config, generation config and tokenizer of a model folder."""
    # Generation stops at the ids of the tokenizer that the model was trained with, not at those of the config.
    special = {} if tokenizer is None else special_ids(tokenizer)
    full = both_spellings({**config, **special, "dtype": _DTYPE_NAMES[dtype]})
    _write_json(folder / "config.json", full)
    ids = {name: full[name] for name in _SPECIAL_IDS if full.get(name) is not None}
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.8, "top_k": 50, **ids})
    for name in TOKENIZER_FILES:
        if tokenizer is not None and (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)


def special_ids(tokenizer: Path) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as ``tokenizer_config.json`` names them, if it is there.

    Raises ``DataError`` if the folder lacks ``tokenizer.json``.
    """
    from tokenizers import Tokenizer

    if not (tokenizer / "tokenizer.json").is_file():
        raise DataError(f"task.tokenizer: {tokenizer} has no tokenizer.json")
    coder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    settings = tokenizer / "tokenizer_config.json"
    if not settings.is_file():
        return {}
    named = json.loads(settings.read_text(encoding="utf-8"))
    return {f"{role}_id": _id(coder, named.get(role)) for role in ("bos_token", "eos_token", "pad_token")}


def _id(coder: Any, token: Any) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    found: int | None = None if text is None else coder.token_to_id(text)
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
