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
        self._shared: dict[tuple[str, str], _Shared] = {}
        self.copies = [0, 0]
        """How many parts were read through each channel."""

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
        made = _Shared(self._folder, allocation, group, self.copies)
        return self._shared.setdefault((allocation.name, group.group_name), made)


class _Shared:
    def __init__(self, folder: Path, allocation: _Allocation, group: dist.ProcessGroup, copies: list[int]) -> None:
        self._folder = folder
        self._allocation = allocation
        self._group = group
        self._copies = copies
        self._channel: int | None = None
        self._is_open = False

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """The first opens the others' memory to this process, the next one closes it.

        ``timeout_ms`` is the GPUs'; who waits in vain here fails after the time of the process group.
        """
        assert self._channel in (None, channel), "two streams may wait at this memory at once"
        self._channel, self._is_open = channel, not self._is_open
        dist.barrier(self._group)

    def get_remote_tensor(self, peer: int, sizes: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        assert self._is_open, "before the barrier the others may not have written, behind the next they may write again"
        assert self._channel is not None
        self._copies[self._channel] += 1
        assert peer != self._group.rank(), "that is the process's own"
        assert (sizes, dtype) == (self._allocation.shape, self._allocation.dtype)
        rank = dist.get_global_rank(self._group, peer)
        return mapped(self._folder / f"{rank}-{self._allocation.name}", sizes, dtype)


def mapped(path: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=shape.numel(), dtype=dtype).view(shape)
