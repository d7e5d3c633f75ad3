"""How many machines and processes a job asks for."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.base import SpecModel


class ComputeSpec(SpecModel):
    """Nodes and processes. World size = instance_count x processes_per_instance."""

    instance_count: int = Field(default=1, ge=1)
    """Nodes (on the local backend: pretended nodes, each with its own torchrun)."""
    processes_per_instance: int = Field(default=1, ge=1)
    """Processes a node runs: one per accelerator."""

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.instance_count * self.processes_per_instance
