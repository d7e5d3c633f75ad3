"""Agreements between all processes over CPU groups of their own, so that no device is ever synchronised for one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from sm_llm.errors import SmLlmError

T = TypeVar("T")

CONTROL_TIMEOUT = timedelta(minutes=30)
"""How long one process may lag behind the others in a collective (staging, reading a checkpoint)."""


class ControlGroup:
    """One gloo group. Every method is a collective: all processes call it, in the same order, from one thread.

    Two threads need two groups: collectives of one group that cross each other hang.
    """

    def __init__(self, timeout: timedelta = CONTROL_TIMEOUT) -> None:
        self.group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=timeout))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every process."""
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return cast("T", box[0])

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank, on every process."""
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value, group=self.group)
        return cast("list[T]", box)

    def any(self, flag: bool) -> bool:
        """Whether any process does."""
        tensor = torch.tensor(int(flag), dtype=torch.int32)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return bool(tensor.item())

    def outcome(self, error: BaseException | None) -> str | None:
        """None if every process is fine; else the lowest failing rank and its error, the same text everywhere."""
        texts = self.gather(None if error is None else _describe(error))
        return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None), None)

    def barrier(self) -> None:
        """Wait for all processes."""
        dist.barrier(group=self.group)


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, SmLlmError) else f"{type(error).__name__}: {error}"
