"""FSDP's collectives by the copy engines of the GPUs of one node, through torch's symmetric memory.

NCCL's kernels run beside matrix products and take multiprocessors from them. Here each GPU copies what it needs out of
the memory of the others, by its copy engines; before and after, one thread block waits for the other GPUs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sm_llm.errors import RunFailed
from sm_llm.worker.strategies.fsdp.mesh import without_multicast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.device import Device

_GATHERING, _REDUCING = 0, 1
"""Channels of barriers: those of two streams at the same time must differ."""
_TRIAL_TIMEOUT = 60_000
"""Milliseconds that a GPU waits for another one in a trial; then torch fails, where it would wait for ever."""


class PeerBuffers:
    """Memory that the other GPUs of a group read: two buffers, in turn.

    FSDP has at most two of a kind in use, the last one and the next one. Every process asks for the same sizes in the
    same order, so that the same buffer is meant by all.
    """

    def __init__(self, device: torch.device, channel: int, size: int) -> None:
        """Allocate them, ``size`` bytes each. ``connect`` comes before the first use."""
        self._channel = channel
        self.timeout = 0
        """Milliseconds that a GPU waits for the others; 0: for ever."""
        self._buffers = [symmetric.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        # New memory is filled with zeros, on another stream than the one that is about to write to it.
        torch.get_device_module(device).synchronize()
        self._unused = [_references(it) for it in self._buffers]
        """References to the storage of each when nobody else has any."""
        self._turn = 0

    def connect(self, group: dist.ProcessGroup) -> None:
        """Let the processes of a group read them. A collective, on the hosts."""
        for buffer in self._buffers:
            symmetric.rendezvous(buffer, group)

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next buffer as a tensor of this size. Raises ``RunFailed`` if what it held is still in use."""
        turn, self._turn = self._turn, 1 - self._turn
        buffer = self._buffers[turn]
        if _references(buffer) > self._unused[turn]:
            raise RunFailed(
                f"torch {torch.__version__} keeps more than two groups of parameters, or of gradients, at a time. Set "
                "task.parallelism.copy_engine_collectives to false"
            )
        return buffer[: math.prod(size) * dtype.itemsize].view(dtype).view(*size)

    def others(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
        """Rank and ``tensor`` (flat) of every other process, once all have written theirs. At the end all have read."""
        (buffer,) = (it for it in self._buffers if it.data_ptr() == tensor.data_ptr())
        shared = symmetric.rendezvous(buffer, group)
        shared.barrier(self._channel, self.timeout)
        for step in range(1, group.size()):
            # Each starts with its neighbour, so that no GPU is read by all of them at once.
            rank = (group.rank() + step) % group.size()
            theirs = shared.get_remote_tensor(rank, buffer.shape, buffer.dtype)
            yield rank, theirs[: tensor.nbytes].view(tensor.dtype)
        shared.barrier(self._channel, self.timeout)


class PeerGather:
    """An all-gather for ``FSDPModule.set_custom_all_gather``."""

    def __init__(self, device: torch.device, size: int) -> None:
        """``size``: bytes of the largest group of parameters."""
        self.buffers = PeerBuffers(device, _GATHERING, size)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is gathered; FSDP writes the process's own part into it."""
        return self.buffers.take(size, dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        part = input_tensor.numel()
        for rank, theirs in self.buffers.others(output_tensor, group):
            output_tensor.narrow(0, rank * part, part).copy_(theirs.narrow(0, rank * part, part), non_blocking=True)


class PeerSum:
    """Adds up gradients, which travel as they were computed, in bf16, in fp32: half of NCCL's bytes, the same sums."""

    def __init__(self, device: torch.device, size: int) -> None:
        """``size``: bytes of the gradients of the largest group of parameters."""
        self.buffers = PeerBuffers(device, _REDUCING, size)

    def allocate(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory for the gradients of a group of parameters."""
        return self.buffers.take(size, dtype)

    def add(self, result: torch.Tensor, gradients: torch.Tensor, group: dist.ProcessGroup, *, averages: bool) -> None:
        """Put the sum, or the average, of the processes' parts for this one, by rank, into ``result``."""
        part, rank, count = result.numel(), group.rank(), group.size()
        received = torch.empty(count - 1, part, dtype=gradients.dtype, device=gradients.device)
        for other, theirs in self.buffers.others(gradients, group):
            received[other - (other > rank)].copy_(theirs.narrow(0, rank * part, part), non_blocking=True)
        own = gradients.view(-1).narrow(0, rank * part, part)
        _add_parts(own, received, rank, 1 / count if averages else 1.0, result)


@dataclass(frozen=True)
class Sharing:
    """What decides whether processes can copy from one another."""

    device: Device
    layout: Layout
    node_size: int
    group: dist.ProcessGroup
    """The processes that share a copy of the parameters."""
    size: int
    """Bytes of the largest group of parameters."""


class PeerCollectives:
    """Both collectives with their memory; without them where ``reason`` is why not."""

    def __init__(self, sharing: Sharing, *, is_asked_for: bool, sums: bool) -> None:
        """A collective of all processes, which agree. Without ``sums`` gradients go by NCCL.

        Memory is allocated while nothing else is on the GPU: later it would be taken outside of torch's own allocator,
        which might hold all of it.
        """
        self.gather: PeerGather | None = None
        self.sum: PeerSum | None = None
        self._sums = sums
        # Each part only when it has worked for all: else some would wait for the others for ever.
        self.reason = (
            _agreed(_obstacle(sharing, is_asked_for=is_asked_for))
            or _agreed(self._allocate(sharing))
            or _agreed(self._connect(sharing))
            or _agreed(self._failure(sharing))
        )
        if self.reason:
            self.gather = self.sum = None

    def _allocate(self, sharing: Sharing) -> str:
        without_multicast()
        device = sharing.device.torch_device
        try:
            self.gather = PeerGather(device, sharing.size)
            self.sum = PeerSum(device, sharing.size) if self._sums else None
        except Exception as error:  # a private interface of torch, of which any may come
            return _shown(error)
        return ""

    def _connect(self, sharing: Sharing) -> str:
        try:
            for buffers in self._buffers():
                buffers.connect(sharing.group)
        except Exception as error:
            return _shown(error)
        return ""

    def _buffers(self) -> list[PeerBuffers]:
        return [it.buffers for it in (self.gather, self.sum) if it is not None]

    def _failure(self, sharing: Sharing) -> str:
        """What goes wrong when every process gives its rank to all others, through each of the buffers."""
        rank, count = sharing.group.rank(), sharing.group.size()
        for buffers in self._buffers():
            buffers.timeout = _TRIAL_TIMEOUT
        try:
            # Both are used before anything is compared: the others would wait for a process that has found a fault.
            rounds = [self._exchanged(sharing) for _ in range(2)]
        except Exception as error:
            return _shown(error)
        for buffers in self._buffers():
            buffers.timeout = 0
        expected = [*range(count), *([count * rank + sum(range(count))] if self._sums else [])]
        wrong = next((it for it in rounds if it != expected), None)
        return "" if wrong is None else f"wrong numbers were copied to rank {rank}: {wrong}"

    def _exchanged(self, sharing: Sharing) -> list[float]:
        """All ranks, and with ``sums`` the sum of what the processes have for this one: their rank plus its own."""
        device, rank, count = sharing.device.torch_device, sharing.group.rank(), sharing.group.size()
        assert self.gather is not None
        own = torch.full((1,), float(rank), device=device)
        found = self.gather.allocate((count,), dtype=own.dtype, device=device)
        found[rank] = own[0]
        self.gather(found, own, sharing.group)
        numbers: list[float] = found.tolist()
        if self.sum is not None:
            given = self.sum.allocate((count,), own.dtype)
            given.copy_(torch.arange(count, device=device) + rank)
            self.sum.add(own, given, sharing.group, averages=False)
            numbers.append(own.item())
        return numbers


def largest_group(groups: Iterable[Iterable[torch.nn.Module]], shards: int) -> int:
    """Elements of the largest group of modules, without parameters of those before; with what FSDP pads, or more."""
    seen: set[int] = set()
    sizes = [0]
    for modules in groups:
        own = [it for module in modules for it in module.parameters() if id(it) not in seen]
        seen |= set(map(id, own))
        local = [it.to_local() if isinstance(it, DTensor) else it for it in own]
        # Rows are padded to a multiple of the shards.
        sizes.append(sum(it.numel() + shards * it.numel() // max(1, it.shape[0]) for it in local))
    return max(sizes)


def _add_parts(own: torch.Tensor, received: torch.Tensor, rank: int, factor: float, result: torch.Tensor) -> None:
    """``result`` [n] = ``factor`` times the sum in fp32 of ``own`` [n] and ``received`` [others, n], by rank."""
    if result.is_cuda:
        from sm_llm.worker.strategies.fsdp.kernels import add_parts

        add_parts(own, received, rank, factor, result)
    else:
        parts = torch.cat([received[:rank], own[None], received[rank:]])
        torch.sum(parts, 0, dtype=torch.float32, out=result).mul_(factor)


def _obstacle(sharing: Sharing, *, is_asked_for: bool) -> str:
    # Neighbouring ranks share a copy: one that does not divide a node would begin on it and end on the next one.
    if sharing.node_size % (sharing.layout.shard * sharing.layout.tensor):
        return "parameters are sharded over several nodes"
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        return f"FSDP of torch {torch.__version__} takes no other collectives"
    return sharing.device.copy_obstacle(sharing.node_size, is_asked_for=is_asked_for)


def _agreed(reason: str) -> str:
    """The first reason that a process has."""
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _shown(error: Exception) -> str:
    first, _, _ = str(error).partition("\n")
    return f"torch's symmetric memory: {type(error).__name__}: {first}"


def _references(buffer: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)
    return count
