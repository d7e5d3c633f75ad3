"""Sums of gradients over shards, in memory that the rest of the step can use when they are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence


class SharedMemoryReduceScatter:
    """FSDP2's reduce-scatter (``FSDPModule.set_custom_reduce_scatter``), whose results share the step's own memory.

    torch's allocator keeps free memory apart for each stream. FSDP allocates the reduced gradients, 4 bytes for each
    parameter of a shard, on the stream that reduces: during the whole forward pass that memory is free and nobody can
    have it (15 GiB of 8B on two GPUs). Here it comes from the stream that computes.

    A block of the computing stream's memory is free to that stream when the kernels before it are done, and FSDP lets
    the reducing stream wait for them just before it allocates. On the way back, FSDP lets the computing stream wait for
    the reducing one at the end of the backward pass: so this is safe for gradients that stay until the optimiser has
    read them. A result that is added to an earlier one and dropped at once stays where it was: see ``keeps``.
    """

    def __init__(self, device: torch.device) -> None:
        self._computing = torch.cuda.current_stream(device)
        self.keeps = True
        """Whether the next results become gradients themselves."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what goes in, and for what comes out."""
        stream = self._computing if self.keeps else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work
