"""How many machines and processes a job asks for."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.machines.hardware import instance


class ComputeSpec(SpecModel):
    """Nodes and processes. World size = instance_count x processes of a node."""

    instance_type: str | None = None
    """Machine to rent, e.g. ml.p5.48xlarge; null on the local backend, which is what it is."""
    instance_count: int = Field(default=1, ge=1, le=10_000)
    """Nodes (on the local backend: simulated nodes, each with its own torchrun)."""
    processes_per_instance: int | None = Field(default=None, ge=1, le=1_024)
    """Processes a node runs; null means one per accelerator of the instance type, or one where there is none."""

    @property
    def processes(self) -> int:
        """Processes of one node."""
        row = instance(self.instance_type)
        return self.processes_per_instance or (row.processes if row else 1)

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.instance_count * self.processes
