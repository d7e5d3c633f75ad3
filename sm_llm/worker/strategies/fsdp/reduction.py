"""FSDP2's sums of gradients over shards: who adds them up, and whose memory the results are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.worker.strategies.fsdp.peer_copies import PeerSum


class GradientReduction:
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``. FSDP asks it for memory in pairs: in, then out.

    ``peers`` add up gradients in place of NCCL, and take them as they were computed; sums are in fp32.

    ``shares_memory``: results are in the memory of the stream that computes. torch's allocator keeps free memory apart
    for each stream. FSDP allocates the reduced gradients, 4 bytes for each parameter of a shard, on the stream that
    reduces: during the whole forward pass that memory is free and nobody can have it (15 GiB of 8B on two GPUs).

    A block of the computing stream's memory is free to that stream when the kernels before it are done, and FSDP lets
    the reducing stream wait for them just before it allocates. On the way back, FSDP lets the computing stream wait for
    the reducing one at the end of the backward pass: so this is safe for gradients that stay until the optimiser has
    read them. A result that is added to an earlier one and dropped at once stays where it was: see ``keeps``.
    """

    def __init__(self, device: torch.device, *, peers: PeerSum | None, shares_memory: bool) -> None:
        self._peers = peers
        self._computing = torch.cuda.current_stream(device) if shares_memory else None
        self._is_result = False
        self.keeps = True
        """Whether the next results become gradients themselves."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what goes in, and at every second call for what comes out."""
        is_result, self._is_result = self._is_result, not self._is_result
        if self._peers is not None and not is_result:
            return self._peers.allocate(size, dtype)
        own = dtype if self._peers is None else torch.float32
        if self._computing is None:
            return torch.empty(*size, dtype=own, device=device)
        stream = self._computing if self.keeps else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            return torch.empty(*size, dtype=own, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._peers is None:
            work: dist.Work | None = dist.reduce_scatter_tensor(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
        assert op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM), op
        self._peers.add(output_tensor, input_tensor, group, averages=op == dist.ReduceOp.AVG)
        return None
