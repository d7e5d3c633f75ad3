"""A hash over everything that a process restores: parameters, optimiser state, random generators, place in the data."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping


def state_hash(state: Mapping[str, torch.Tensor], private: Mapping[str, Any]) -> str:
    """SHA-256 over this process's shards of ``state`` by name and ``private`` (JSON values). Waits for the device."""
    digest = hashlib.sha256(json.dumps(private, sort_keys=True).encode())
    for name in sorted(state):
        tensor = state[name].detach()
        # Only this process's shard: hashing needs no communication.
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # The form as well: the same bytes under another name or shape are another state.
        digest.update(f"{name} {local.dtype} {tuple(local.shape)}".encode())
        # Bytes, because numpy has no bf16.
        digest.update(local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
