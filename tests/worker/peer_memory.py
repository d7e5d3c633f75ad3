"""A double of torch's symmetric memory for processes that compute on CPUs: files that all of them map.

Mirrors what ``peer_copies`` calls of ``torch.distributed._symmetric_memory`` and refuses anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class _Allocation:
    name: str
    shape: torch.Size
    dtype: torch.dtype


class PeerMemory:
    """Allocations of one process; those of the others are the files of the same number."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, _Allocation] = {}
        self._count = 0

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        self._count += 1
        allocation = _Allocation(f"{self._count}", torch.Size(size), dtype)
        memory = mapped(self._folder / f"{dist.get_rank()}-{allocation.name}", allocation.shape, dtype)
        self._found[memory.data_ptr()] = allocation
        return memory

    def rendezvous(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> _Shared:
        allocation = self._found.get(tensor.data_ptr())
        assert allocation is not None, "memory of another allocator"
        assert tensor.shape == allocation.shape
        return _Shared(self._folder, allocation, group)


class _Shared:
    def __init__(self, folder: Path, allocation: _Allocation, group: dist.ProcessGroup) -> None:
        self._folder = folder
        self._allocation = allocation
        self._group = group

    def barrier(self, channel: int = 0) -> None:
        assert channel in (0, 1)
        dist.barrier(self._group)

    def get_remote_tensor(self, peer: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        assert peer != self._group.rank(), "that is the process's own"
        assert (sizes, dtype) == (self._allocation.shape, self._allocation.dtype)
        rank = dist.get_global_rank(self._group, peer)
        return mapped(self._folder / f"{rank}-{self._allocation.name}", sizes, dtype)


def mapped(path: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype).view(shape)
