"""FSDP's collectives by the copy engines of the GPUs of one node, through torch's symmetric memory.

NCCL's kernels run beside matrix products and take multiprocessors from them. Here each GPU copies what it needs out of
the memory of the others, by its copy engines; before and after, one thread block waits for the other GPUs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.fsdp import FSDPModule

from sm_llm.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.device import Device

_GATHERING, _REDUCING = 0, 1
"""Channels of barriers: those of two streams at the same time must differ."""


class PeerBuffers:
    """Memory that the other GPUs of a group read: two buffers, in turn, each as large as what was last asked of it.

    FSDP has at most two of a kind in use, the last one and the next one. Every process asks for the same sizes in the
    same order, so that the same buffer is meant by all.
    """

    def __init__(self, device: torch.device, channel: int) -> None:
        self._device = device
        self._channel = channel
        self._buffers: list[tuple[torch.Tensor, int] | None] = [None, None]
        """Each with the references to its storage when nobody else has any."""
        self._turn = 0

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next buffer as a tensor of this size. Raises ``RunFailed`` if what it held is still in use."""
        turn, self._turn = self._turn, 1 - self._turn
        length = math.prod(size) * dtype.itemsize
        held = self._buffers[turn]
        if held is not None and _references(held[0]) > held[1]:
            raise RunFailed(
                f"torch {torch.__version__} keeps more than two gathered groups of parameters at a time. Set "
                "task.parallelism.copy_engine_collectives to false"
            )
        if held is None or held[0].numel() < length:
            buffer = symmetric.empty(length, dtype=torch.uint8, device=self._device)
            # New memory is filled with zeros, on another stream than the one that is about to write to it.
            torch.get_device_module(self._device).synchronize()
            held = self._buffers[turn] = buffer, _references(buffer)
        buffer, _ = held
        return buffer[:length].view(dtype).view(*size)

    def others(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
        """Rank and ``tensor`` (flat) of every other process, once all have written theirs. At the end all have read."""
        (buffer,) = (it for it, _ in filter(None, self._buffers) if it.data_ptr() == tensor.data_ptr())
        shared = symmetric.rendezvous(buffer, group)
        shared.barrier(self._channel)
        for step in range(1, group.size()):
            # Each starts with its neighbour, so that no GPU is read by all of them at once.
            rank = (group.rank() + step) % group.size()
            theirs = shared.get_remote_tensor(rank, buffer.shape, buffer.dtype)
            yield rank, theirs[: tensor.nbytes].view(tensor.dtype)
        shared.barrier(self._channel)


class PeerGather:
    """An all-gather for ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = PeerBuffers(device, _GATHERING)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is gathered; FSDP writes the process's own part into it."""
        return self._buffers.take(size, dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        part = input_tensor.numel()
        for rank, theirs in self._buffers.others(output_tensor, group):
            output_tensor.narrow(0, rank * part, part).copy_(theirs.narrow(0, rank * part, part), non_blocking=True)


class PeerSum:
    """Adds up gradients, which travel as they were computed, in bf16, in fp32: half of NCCL's bytes, the same sums."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = PeerBuffers(device, _REDUCING)

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the gradients of a group of parameters."""
        return self._buffers.take(size, dtype)

    def add(self, result: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, *, averages: bool) -> None:
        """Put the sum, or the average, of the processes' parts for this one, by rank, into ``result``."""
        part, rank = result.numel(), group.rank()
        received = torch.empty(group.size(), part, dtype=gradients.dtype, device=gradients.device)
        for other, theirs in self._buffers.others(gradients, group):
            received[other].copy_(theirs.narrow(0, rank * part, part), non_blocking=True)
        received[rank].copy_(gradients.view(-1).narrow(0, rank * part, part))
        # In one pass over the memory, which matrix products need as well.
        (torch.mean if averages else torch.sum)(received, 0, dtype=torch.float32, out=result)


def why_not(wanted: bool | str, device: Device, layout: Layout, node_size: int, group: dist.ProcessGroup) -> str:
    """Why the processes of ``group`` cannot use copy engines, or, where they are not asked for, should not; else "".

    A collective of all processes, which agree. ``wanted`` is ``copy_engine_collectives``.
    """
    return _agreed(_obstacle(wanted, device, layout, node_size)) or _agreed(_failure(device.torch_device, group))


def _obstacle(wanted: bool | str, device: Device, layout: Layout, node_size: int) -> str:
    if layout.shard * layout.tensor > node_size:
        return "parameters are sharded over several nodes"
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        return f"FSDP of torch {torch.__version__} takes no other collectives"
    return device.copy_obstacle(node_size, is_asked_for=wanted is True)


def _failure(device: torch.device, group: dist.ProcessGroup) -> str:
    """What goes wrong when every process gives its rank to all others."""
    gather, part = PeerGather(device), torch.full((1,), group.rank(), dtype=torch.int32, device=device)
    try:
        found = gather.allocate((group.size(),), dtype=torch.int32, device=device)
        found[group.rank()] = group.rank()
        gather(found, part, group)
    except (AttributeError, RuntimeError) as error:
        first, _, _ = str(error).partition("\n")
        return f"torch's symmetric memory: {first}"
    return "" if found.tolist() == list(range(group.size())) else f"wrong numbers were copied: {found.tolist()}"


def _agreed(reason: str) -> str:
    """The first reason that a process has."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _references(buffer: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
