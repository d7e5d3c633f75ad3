"""How the processes of a job are arranged: all parallel degrees as one value, for plan and worker alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism. Neighbouring ranks are of one tensor-parallel group, then of one context-parallel group.

    Seen by the parameters, ``world_size = pipeline x replicate x shard x tensor``; seen by the data it is ``pipeline x
    data x context x tensor``. In both the last varies fastest with the rank, as in Megatron-LM and NxD.
    """

    replicate: int = 1
    """Copies of the parameters."""
    shard: int = 1
    """Processes over which one copy is sharded, context-parallel ones among them."""
    context: int = 1
    """Processes that share a sequence."""
    tensor: int = 1
    """Processes that share every matrix."""
    expert: int = 1
    """Processes that share the experts of a mixture; they count among the copies, since each sees rows of its own."""
    pipeline: int = 1
    """Stages, each with a part of the layers, that a micro-batch passes through."""

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def data(self) -> int:
        """The data-parallel degree: how many processes, or groups of them, see rows of their own."""
        return self.world_size // (self.pipeline * self.context * self.tensor)

    def data_rank(self, rank: int) -> int:
        """Which of the ``data`` parts of a batch process ``rank`` sees."""
        # The stages of a pipeline, which change slowest with the rank, see the same rows.
        return rank // (self.context * self.tensor) % self.data

    @property
    def loss_parts(self) -> int:
        """Processes whose losses are different summands: tensor-parallel ones compute the same, and of a pipeline's
        stages only the last computes one."""
        return self.data * self.context

    def degrees(self) -> dict[str, int]:
        """Every degree by the name that checkpoints remember it under; that of pipelines where there is one."""
        # A checkpoint of strategies without pipelines keeps the form that earlier versions write and read.
        pipeline = {"pipeline_parallel_degree": self.pipeline} if self.pipeline > 1 else {}
        return {
            "world_size": self.world_size,
            "data_parallel_degree": self.data,
            "shard_degree": self.shard,
            "context_parallel_degree": self.context,
            "tensor_parallel_degree": self.tensor,
            "expert_parallel_degree": self.expert,
            **pipeline,
        }


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [value for value in range(1, number + 1) if number % value == 0]


def listed(values: list[int], longest: int = 8) -> str:
    """``1, 2, 4``, or the first few."""
    shown = values if len(values) <= longest else values[:longest]
    return ", ".join(map(str, shown)) + (", ..." if shown is not values else "")
