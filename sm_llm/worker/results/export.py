"""Writes the trained model as a Hugging Face folder, one tensor in memory at a time and one shard file at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.models.families.table import family
from sm_llm.models.safetensors_folder import INDEX_FILE, SINGLE_FILE
from sm_llm.worker.model_folder import write_configs, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from sm_llm.worker.strategies.base import Strategy

# One file is held in host memory until it is written.
SHARD_BYTES = 4 * 2**30


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
            write_json(folder / INDEX_FILE, index)


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    # transformers reads the framework from the metadata.
    save_file(tensors, path, metadata={"format": "pt"})
