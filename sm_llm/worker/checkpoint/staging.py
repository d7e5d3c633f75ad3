"""Copies training state to host memory, so that training may continue while the copy is written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sm_llm.worker.checkpoint.host_memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    import torch

    from sm_llm.worker.device import Device

_THREADS = 4
_MOST_SHARE = 0.5
"""Of the host's free memory, for two sets of buffers: data loaders and the page cache of what is written need some."""


class Staging:
    """Host buffers that are kept from save to save: pinned where tensors come from a GPU.

    ``copies`` sets of them take turns: whoever reads one must have finished before the ``stage`` that uses it again.
    """

    def __init__(self, device: Device, *, processes: int = 1, copies: int = 1) -> None:
        """``copies``: as many at most; one where those of all ``processes`` of the node would take too much memory."""
        self._device = device
        self._processes = processes
        self._sets: list[dict[str, Future[torch.Tensor]]] = [{} for _ in range(copies)]
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    @property
    def copies(self) -> int:
        """Sets of buffers: how many states can be on the host at a time."""
        return len(self._sets)

    def prepare(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin to make the buffers for ``state``, beside whatever comes next: to pin 18 GB takes ten seconds."""
        if not self._sets[0]:
            size = sum(_local(it).nbytes for it in state.values()) * self._processes
            # A save that waits is better than a node without memory, whose processes the kernel would kill.
            if size * self.copies > available_memory() * _MOST_SHARE:
                del self._sets[1:]
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="host-buffers")
        for buffers in self._sets:
            for name, tensor in state.items():
                if name not in buffers:
                    buffers[name] = pool.submit(self._device.host_buffer, _local(tensor))
        pool.shutdown(wait=False)

    def stage(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Begin to copy: the same state on the host, and a function that waits until it is complete there.

        The first call is a collective. Sharded tensors stay sharded in the same way, over a mesh of host memory.
        """
        self.prepare(state)
        # The one that was used longest ago comes first.
        self._sets.append(self._sets.pop(0))
        buffers = {name: self._sets[-1][name].result() for name in state}
        wait = self._device.copy_out([(buffers[name], _local(tensor)) for name, tensor in state.items()])
        return {name: self._as_sharded(buffers[name], tensor) for name, tensor in state.items()}, wait

    def hold(self) -> None:
        """Let changes of the state that are asked for from now on come after the copies."""
        self._device.after_copies()

    def _as_sharded(self, buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return buffer
        mesh = self._host_mesh(tensor.device_mesh)
        # ``run_check`` would be a collective for every tensor of every save.
        return DTensor.from_local(
            buffer, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def _host_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The same processes in the same arrangement, on their hosts."""
        if mesh.device_type == "cpu":
            return mesh
        if mesh not in self._meshes:
            # Making a mesh creates process groups, a collective: once, in the first save, when all processes are here.
            self._meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return self._meshes[mesh]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
