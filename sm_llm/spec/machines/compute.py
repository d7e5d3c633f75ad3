"""How many machines and processes a job asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sm_llm.errors import Issue
from sm_llm.spec.base import SpecModel
from sm_llm.spec.field_classes import FREE
from sm_llm.spec.machines.hardware import instance, nearest_instance

if TYPE_CHECKING:
    from collections.abc import Iterator


class ComputeSpec(SpecModel):
    """Nodes and processes. World size = instance_count x processes of a node."""

    instance_type: str | None = None
    """Machine to rent, e.g. ml.p5.48xlarge; null on the local backend, which runs on this machine."""
    instance_count: int = Field(default=1, ge=1, le=10_000)
    """Nodes (on the local backend: simulated nodes, each with its own torchrun)."""
    gpu: Annotated[str | None, FREE] = None
    """GPU of a node where no instance type names it, for the estimate of memory in a plan and its number formats:
    ``H200``, ``A100 80GB``, what nvidia-smi prints (``NVIDIA H100 80GB HBM3``), or another one with its memory in GiB
    (``RTX 4090 24GB``). On the local backend it is this machine's."""
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


def gpu_issues(compute: ComputeSpec) -> Iterator[Issue]:
    """A GPU whose memory is not known, or that is named beside an instance type, which has its own."""
    path, given = "compute.gpu", compute.gpu
    if given is None:
        return
    from sm_llm.spec.machines.gpu_names import GPU_GIB, read_gpu

    named = read_gpu(given)
    if compute.instance_type is not None:
        problem = f"{compute.instance_type} names the GPU already"
        yield Issue("gpu-beside-instance-type", path, problem, given, "Leave it out")
    elif named.card is None and named.sizes:
        sizes = [f"{it:g}" for it in sorted(named.sizes)]
        problem = f"no {named.model} has this memory: it must be one of {', '.join(sizes)} GiB"
        remedy = f"Use {' or '.join(f'{named.model} {it}GB' for it in sizes)}"
        yield Issue("gpu-memory-unknown", path, problem, given, remedy)
    elif named.card is None:
        remedy = f"Write its memory in GiB behind its name, as in RTX 4090 24GB, or use one of {', '.join(GPU_GIB)}"
        yield Issue("gpu-unknown", path, "is not in the table of GPUs, so its memory is not known", given, remedy)


def unknown_type(path: str, name: str, processes: int | None) -> Iterator[Issue]:
    """The issue of an instance type at ``path`` that the table lacks, where ``processes`` of a node are not given."""
    if instance(name) is not None or processes is not None:
        return
    meant = nearest_instance(name)
    problem = "is not in the table of instance types, so it is not known how many processes a node runs"
    known = "give compute.processes_per_instance: its accelerators, or 1 if it has none"
    remedy = f"Did you mean {meant.name}? If not, {known}" if meant else f"If it is right, {known}"
    yield Issue("instance-type-unknown", path, problem, name, remedy)
