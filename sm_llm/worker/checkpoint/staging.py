"""Copies training state to host memory, so that training may continue while the copy is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from sm_llm.worker.device import Device


class Staging:
    """Host buffers that are kept from save to save: pinned where tensors come from a GPU.

    One copy exists at a time: whoever reads the last one must have finished before the next ``stage``.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}

    def stage(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The same state on the host; returns when the copies are complete. The first call is a collective.

        Sharded tensors stay sharded in the same way, over a mesh of host memory.
        """
        staged = {name: self._copy(name, tensor) for name, tensor in state.items()}
        self._device.wait()
        return staged

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._device.host_buffer(local)
            self._buffers[name] = buffer
        # All copies are queued on the device and run one after the other; ``stage`` waits once for all of them.
        buffer.copy_(local, non_blocking=True)
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
