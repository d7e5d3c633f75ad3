"""Which part of which parameter a process holds under FSDP1, which shards flattened parameters end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._runtime_utils import _reshard

from sm_llm.worker.parameter_names import with_plain_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.worker.strategies.weights import WeightReader


@dataclass(frozen=True)
class ParameterSlice:
    """Elements ``begin`` to ``end`` of a parameter of this ``shape``, flattened; both 0 where the process has none."""

    shape: tuple[int, ...]
    begin: int
    end: int


def named_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by Hugging Face name, each the process's own elements; a tied head appears once."""
    return with_plain_names(model.named_parameters())


def pieces(model: FSDP) -> dict[str, ParameterSlice]:
    """What this process holds of every parameter of a model that was wrapped with ``use_orig_params``.

    Reads what FSDP notes about its flat parameters (torch 2.5.1: ``FlatParameter._shard_param_infos``).
    """
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    found = {}
    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        if handle is None:  # a module whose parameters are all in others
            continue
        flat = handle.flat_param
        for parameter, shape, info in zip(flat._params or (), flat._shapes, flat._shard_param_infos, strict=True):
            first, last = info.intra_param_start_idx, info.intra_param_end_idx  # None for what is in other shards
            begin, end = (0, 0) if first is None or last is None else (first, last + 1)
            found[names[id(parameter)]] = ParameterSlice(tuple(shape), begin, end)
    return found


@torch.no_grad()
def fill(
    parameters: Mapping[str, torch.nn.Parameter], held: Mapping[str, ParameterSlice], weights: WeightReader
) -> None:
    """Give every parameter its values: each process reads only the rows that its own elements are in."""
    for name, parameter in parameters.items():
        piece = held[name]
        if piece.end > piece.begin:
            parameter.view(-1).copy_(read_elements(weights, name, piece))


def read_elements(weights: WeightReader, name: str, piece: ParameterSlice) -> torch.Tensor:
    """The elements of a piece, flat."""
    rest = piece.shape[1:]
    row = 1
    for size in rest:
        row *= size
    # FSDP1 cuts flattened parameters anywhere, also within a row: whole rows are read, and cut below.
    first, last = piece.begin // row, -(-piece.end // row)
    rows = weights.read(name, (first, *(0 for _ in rest)), (last - first, *rest))
    return rows.reshape(-1)[piece.begin - first * row : piece.end - first * row]


def reshard(model: FSDP) -> None:
    """Free what a forward pass without a backward pass has left gathered: then parameters are shards again."""
    for module in FSDP.fsdp_modules(model):
        handle = module._handle
        shard = getattr(handle.flat_param, "_local_shard", None) if handle else None  # None before the first forward
        if handle is not None and shard is not None and handle.flat_param.data_ptr() != shard.data_ptr():
            _reshard(module, handle, True)
