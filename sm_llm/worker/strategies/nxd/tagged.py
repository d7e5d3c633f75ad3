"""Checkpoints in NxD's layout: ``step_N/model`` and ``step_N/optim``, with what a conversion needs beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.convert.report import trained_manifest
from sm_llm.convert.work import MANIFEST, write_whole
from sm_llm.errors import CheckpointError
from sm_llm.worker.model_folder import write_configs
from sm_llm.worker.strategies.nxd import library
from sm_llm.worker.training.optim import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.convert.layout import NxdDegrees

# What ZeRO-1 calls them in a checkpoint of its own.
_STATE, _MASTERS, _STEP = "base_state", "sharded_master_weights", "step"


def tag_of(step: int) -> str:
    """As NxD's own scripts name it."""
    return f"step_{step}"


@dataclass(frozen=True)
class RankFiles:
    """Where a process's parts are below a tag. Without ZeRO-1 a data-parallel group has one optimiser state."""

    tensor_rank: int
    stage: int
    data_rank: int
    data_degree: int
    zero1: bool

    def reads(self, step: int) -> list[str]:
        """See ``CheckpointLibrary.checkpoint_reads``."""
        own = f"tp_rank_{self.tensor_rank:02d}_pp_rank_{self.stage:02d}.pt"
        if not self.zero1:
            return [it for kind in ("model", "optim") for it in _files(f"{tag_of(step)}/{kind}/dp_rank_00_{own}")]
        # By the file of this rank NxD finds out that each data-parallel rank has a state of its own.
        marker = ["optim/dp_rank_01_tp_rank_00_pp_rank_00.pt"] if self.data_degree > 1 else []
        files = _files(f"{tag_of(step)}/optim/dp_rank_{self.data_rank:02d}_{own}")
        return [*files, *(f"{tag_of(step)}/{it}" for it in marker)]


def _files(path: str) -> list[str]:
    return [path, f"{path}.info.pt", f"{path}.tensors/"]


def write(
    folder: Path,
    step: int,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    *,
    zero1: bool,
) -> None:
    """Write ``weights``, and ``state``: the optimiser's flat names, and with ZeRO-1 the masters as ``model.NAME``."""
    # By name and not by number, as NxD's own state has them: an order that has changed is noticed.
    optimizer: dict[str, Any] = {_STATE: {}, _STEP: state["optimizer.step"]}
    if zero1:
        optimizer[_MASTERS] = {name: state[f"model.{name}"] for name in weights}
    for name in weights:
        optimizer[_STATE][name] = {it: state[f"optimizer.{name}.{it}"] for it in MOMENTS}
    library.save_checkpoint(folder, tag_of(step), dict(weights), optimizer, zero1=zero1)


@torch.no_grad()
def read(folder: Path, step: int, state: Mapping[str, torch.Tensor], *, zero1: bool) -> None:
    """Fill the tensors of ``state``, by the names that ``write`` takes. Raises ``CheckpointError``."""
    tag = tag_of(step)
    if not (folder / tag).is_dir():
        raise CheckpointError(f"{folder} holds no {tag} in the layout of NxD: another release of this package saved it")
    # ZeRO-1's parameters are in the optimiser's state, and the rounded copies follow from them.
    model: dict[str, Any] | None = None if zero1 else {}
    optimizer: dict[str, Any] = {}
    library.load_checkpoint(folder, tag, model, optimizer)
    parameters: Mapping[str, torch.Tensor] = optimizer.get(_MASTERS, {}) if zero1 else model or {}
    found = {f"model.{name}": it for name, it in parameters.items()}
    for name, moments in optimizer[_STATE].items():
        found |= {f"optimizer.{name}.{it}": tensor for it, tensor in moments.items()}
    found["optimizer.step"] = optimizer[_STEP]
    if apart := sorted(found.keys() ^ state.keys()):
        raise CheckpointError(f"{folder / tag} and this job's model differ in {', '.join(apart[:6])}")
    for name, tensor in state.items():
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder / tag}: {name} is {found[name].dtype} {list(found[name].shape)}, this job's is "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        tensor.copy_(found[name])


def describe(
    folder: Path, step: int, config: Mapping[str, Any], degrees: NxdDegrees, dtype: torch.dtype, tokenizer: str | None
) -> None:
    """Config, tokenizer and manifest beside the shards, so that ``convert`` makes a whole model of them."""
    tag = folder / tag_of(step)
    # Beside the shards, where the conversion looks for them as in a folder that it wrote itself.
    write_configs(tag, config, dtype, None if tokenizer is None else Path(tokenizer))
    write_whole(tag / MANIFEST, trained_manifest(str(config["model_type"]), degrees).encode())
