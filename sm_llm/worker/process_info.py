"""A worker process's place among the others of its job, and the folders of its node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.runs.run_paths import CONTAINER_BASE, ContainerPaths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.contract.hosts import Hosts


def container_paths(environ: Mapping[str, str]) -> ContainerPaths:
    """The container contract's folders of this node."""
    return ContainerPaths(Path(environ.get("SAGEMAKER_BASE_DIR", CONTAINER_BASE)))


@dataclass(frozen=True)
class ProcessInfo:
    """One process among all: torchrun's ranks. A node is what one torchrun agent runs."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    node_count: int = 1

    @classmethod
    def read(cls, environ: Mapping[str, str], hosts: Hosts | None = None) -> ProcessInfo:
        """From torchrun's variables; without them, the only process of its host, and of the job if ``hosts`` is one."""
        if hosts is not None and "WORLD_SIZE" not in environ:
            # One process per host, as SageMaker starts containers without torchrun.
            node, count = hosts.names.index(hosts.current), len(hosts.names)
            return cls(rank=node, world_size=count, node=node, node_count=count)

        def number(name: str, default: int) -> int:
            return int(environ.get(name, default))

        return cls(
            rank=number("RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_rank=number("LOCAL_RANK", 0),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node=number("GROUP_RANK", 0),
            node_count=number("GROUP_WORLD_SIZE", 1),
        )

    @property
    def is_leader(self) -> bool:
        """Whether this is global rank 0: it decides, writes events and prints."""
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """Whether this process moves its node's files."""
        return self.local_rank == 0
