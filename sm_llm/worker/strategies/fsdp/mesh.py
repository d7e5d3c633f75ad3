"""The device meshes of a layout, and the process group they live in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sm_llm.worker.object_collectives import restrict_object_collectives

if TYPE_CHECKING:
    import torch

    from sm_llm.spec.parallelism.base import Layout
    from sm_llm.worker.process_info import ProcessInfo


@dataclass(frozen=True)
class Meshes:
    """The processes of a job as its parameters and as its sequences see them.

    ``parameters`` has a dimension ``shard`` and, where their degree is not 1, ``replicate`` before and ``tensor``
    behind it: every parameter is distributed over all of them.
    """

    parameters: DeviceMesh
    context: DeviceMesh | None
    """The group of processes that share this one's sequences, in order; None if they are not split."""

    @property
    def data(self) -> DeviceMesh:
        """What FSDP shards, and replicates, over."""
        names = self.parameters.mesh_dim_names or ()
        wanted = tuple(name for name in names if name != "tensor")
        return self.parameters if wanted == names else self.parameters[wanted]

    @property
    def shard(self) -> dist.ProcessGroup:
        """The processes that hold one copy of the parameters together."""
        return self.parameters.get_group("shard")

    @property
    def tensor(self) -> DeviceMesh | None:
        """The group of processes that share matrices; None if they are not split."""
        return self.parameters["tensor"] if "tensor" in (self.parameters.mesh_dim_names or ()) else None


def without_multicast() -> None:
    """Let torch's symmetric memory set up no NVLink multicast, unless the user wants it.

    Copies and barriers need none, and its set-up can hang.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def library_of(group: dist.ProcessGroup, device_type: str) -> str:
    """torch's name of what carries a group's collectives of tensors on such devices: ``nccl``, ``gloo``."""
    by_type = (it.rpartition(":") for it in dist.get_backend(group).split(","))
    return next(name for kind, _, name in by_type if kind in ("", device_type))


def make_meshes(device_type: str, layout: Layout) -> Meshes:
    """A collective."""
    sizes = {"replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor}
    # FSDP needs a dimension to shard over, even one of a single process.
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    parameters = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if layout.context == 1:
        return Meshes(parameters, None)
    shape = (layout.data, layout.context, layout.tensor)
    # Another view of the same ranks: parameters are sharded across context-parallel processes, too.
    sequences = init_device_mesh(device_type, shape, mesh_dim_names=("data", "context", "inner"))
    return Meshes(parameters, sequences["context"])


def start_process_group(device: torch.device, process: ProcessInfo) -> bool:
    """Unless the program has done so; returns whether it was done here."""
    if dist.is_initialized():
        return False
    restrict_object_collectives()
    # gloo as well: staged checkpoints and offloaded gradients are tensors of the host.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    else:  # started without torchrun: the only process
        dist.init_process_group(backend, store=HashStore(), rank=process.rank, world_size=process.world_size)
    return True
