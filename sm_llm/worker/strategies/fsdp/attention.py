"""Causal attention for whole rows: without a mask to make, in a window, or over sequences that processes share.

For its own implementations transformers reads the position ids for packed sequences, and so waits for the device
once in every forward pass. Under a name that it has no mask function for it makes no mask; what is needed is made here.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from sm_llm.spec.machines.hardware import FLEX, RING
from sm_llm.worker.strategies.chunks import chunk_positions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

NAME = "sm_llm_causal"
BLOCK_DEVICES = ("cuda",)
"""Where a window is computed by FlexAttention: on CPUs it is slower than a mask."""
# Dimension of the sequence in [batch, heads, sequence, channels].
_SEQUENCE = 2


class CausalAttention:
    """An attention implementation for transformers (``AttentionInterface``).

    Where ``context`` processes share a sequence, each has two chunks of it, the r-th and the r-th from its end, so that
    all have as much to do. On GPUs PyTorch's context parallelism passes keys and values around; on CPUs, and in a
    sliding window, which that one does not know, all are gathered.
    """

    def __init__(
        self, window: int | None, context: DeviceMesh | None, device: torch.device, *, drops: bool = False
    ) -> None:
        """``drops``: the model has dropout in attention, which FlexAttention does not compute."""
        self._window = window
        self._context = context
        self.device = device
        self._takes_blocks = context is None and device.type in BLOCK_DEVICES and not drops
        self._length = 0
        self.repeats_keys = False
        """Whether each query head gets a key head of its own: for a kernel that knows no groups of heads."""
        self.mask: torch.Tensor | None = None
        # Instead of a mask, where a window is computed by FlexAttention.
        self._blocks: Any = None
        # Place of each token of this process in its whole sequence, [sequence].
        self.positions = torch.empty(0)
        self._rings = context is not None and device.type == "cuda" and window is None
        if self._rings:
            _enable_rings()

    def register(self) -> str:
        """Make it known to transformers; returns its name there."""
        from transformers import AttentionInterface

        AttentionInterface.register(NAME, self.attend)
        return NAME

    def prepare(self, length: int) -> None:
        """Get ready for sequences of ``length`` tokens in all. Costs something only when the length changes."""
        if length == self._length:
            return
        self._length = length
        degree = 1 if self._context is None else self._context.size()
        rank = 0 if self._context is None else self._context.get_local_rank()
        parts = [chunk_positions(length, degree, it) for it in range(degree)]
        self.positions = parts[rank].to(self.device)
        self.mask = self._blocks = None
        # A window as long as the sequence hides nothing.
        window = self._window if self._window is not None and self._window < length else None
        if window is not None and self._takes_blocks:
            self._blocks = _window_blocks(length, window, self.device)  # a mask keeps cuDNN and flash away
        elif window is not None or (degree > 1 and not self._rings):
            self.mask = self._make_mask(parts[rank], torch.cat(parts)).to(self.device)

    @property
    def replaces_torchs(self) -> str | None:
        """What computes attention in place of one of torch's kernels, for the length that it is prepared for."""
        if self._blocks is not None:
            return FLEX
        return RING if self._rings else None

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens whose queries are computed here, and tokens whose keys they see."""
        return len(self.positions), self._length

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """This process's tokens of [n, sequence, …], for whose length it gets ready."""
        self.prepare(whole.shape[1])
        return whole if self._context is None else whole[:, self.positions]

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """[n, sequence, …] of all tokens in order, from each process's. A collective."""
        if self._context is None:
            return part
        whole = _gather(part, 1, self._context.get_group())
        # Parts come by rank, each with a chunk from either end: sorting their positions puts the tokens in order.
        order = torch.cat(
            [chunk_positions(self._length, self._context.size(), it) for it in range(self._context.size())]
        )
        in_order: torch.Tensor = whole[:, order.argsort().to(whole.device)]
        return in_order

    def _make_mask(self, own: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        distance = own[:, None] - keys[None, :]
        seen = distance >= 0
        return seen if self._window is None else seen & (distance < self._window)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls: [batch, heads, sequence, channels] -> [batch, sequence, heads, channels]."""
        if self._blocks is not None:
            return _in_window(query, key, value, self._blocks, options.get("scaling")), None
        if self._rings:
            return self._ring(module, query, key, value, **options), None
        if self._context is not None:
            group = self._context.get_group()
            # Queries stay split, so the scores do, too.
            key, value = _gather(key, _SEQUENCE, group), _gather(value, _SEQUENCE, group)
        return self.torchs(module, query, key, value, **options), None

    def torchs(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """``attend`` with whole keys and values, by whichever of torch's kernels fits them."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if self.repeats_keys:
            key, value = _repeated(query, key, value)
            scale, drop = options.get("scaling"), options.get("dropout", 0.0)
            causal = self.mask is None
            repeated = F.scaled_dot_product_attention(query, key, value, self.mask, drop, causal, scale=scale)
            return repeated.transpose(1, 2).contiguous()
        output: torch.Tensor = sdpa_attention_forward(module, query, key, value, self.mask, **options)[0]
        return output

    def _ring(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float = 0.0,
        scaling: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        key, value = _repeated(query, key, value)  # the ring's kernels take as many key heads as query heads
        q, k, v = (DTensor.from_local(it, self._context, [Shard(_SEQUENCE)]) for it in (query, key, value))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=True)
        assert isinstance(output, DTensor)
        return output.to_local().transpose(1, 2).contiguous()


def _repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with as many heads as queries have. [batch, heads, sequence, channels]."""
    repeats = query.shape[1] // key.shape[1]
    if repeats == 1:
        return key, value
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


class _Gather(torch.autograd.Function):
    """Join the parts of all processes of a group along a dimension; backward, each gets the sum of its part's."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        front = part.movedim(dim, 0).contiguous()
        # Collectives of one tensor join along the first dimension.
        whole = front.new_empty((front.shape[0] * dist.get_world_size(group), *front.shape[1:]))
        dist.all_gather_into_tensor(whole, front, group=group)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        front = gradient.movedim(ctx.dim, 0).contiguous()
        part = front.new_empty((front.shape[0] // dist.get_world_size(ctx.group), *front.shape[1:]))
        # Every process has used the whole, so a part's gradient is the sum of what all of them give it.
        dist.reduce_scatter_tensor(part, front, group=ctx.group)
        return part.movedim(0, ctx.dim), None, None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives of a group break the graph anyway
def _gather(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    whole: torch.Tensor = _Gather.apply(part, dim, group)  # type: ignore[no-untyped-call]
    return whole


def _window_blocks(length: int, window: int, device: torch.device) -> Any:
    """FlexAttention's map of the blocks that a causal window touches, and of those that it touches in part."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(seen, None, None, length, length, device=device.type)


def _in_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: Any, scale: float | None
) -> torch.Tensor:
    """Attention over the blocks of a window alone. As in ``attend``."""
    # Inside a compiled layer it is compiled with that layer.
    compute = _flex_attention() if not torch.compiler.is_compiling() else _plain_flex_attention()
    output: torch.Tensor = compute(query, key, value, block_mask=blocks, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


def _plain_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _flex_attention() -> Any:
    """Compiled: as it stands it would compute the whole matrix of scores."""
    return torch.compile(_plain_flex_attention())


def _enable_rings() -> None:
    """Let PyTorch's context parallelism take over attention on tensors split along the sequence, for this process.

    Its balanced form expects the chunks of ``chunk_positions``.
    """
    from torch.distributed.tensor.experimental import _attention

    _attention._cp_options.enable_load_balance = True
    _attention._enable_context_parallel_dispatcher()
