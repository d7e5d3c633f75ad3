"""The instance types of a job's nodes: those of its groups where it has groups, else ``compute.instance_type``.

Other modules ask here for what follows from the machines, because ``compute.instance_type`` is one of several types in
a job of groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.spec.machines.hardware import Instance, instance, instance_bf16_flops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.spec.backends.base import InstanceGroup
    from sm_llm.spec.job import JobSpec


def groups(job: JobSpec) -> Sequence[InstanceGroup]:
    """The instance groups of a job; empty where all nodes are of one type."""
    return job.backend.node_groups


def machine_types(job: JobSpec) -> tuple[str, ...]:
    """Names of the instance types of all nodes, each once; empty where none is given."""
    named: list[str | None] = [group.instance_type for group in groups(job)]
    return tuple(dict.fromkeys(name for name in named or [job.compute.instance_type] if name is not None))


def machines(job: JobSpec) -> tuple[Instance, ...]:
    """The rows of all types of a job; empty where one of them is not in the table, for then nothing follows."""
    rows = [instance(name) for name in machine_types(job)]
    known = tuple(row for row in rows if row is not None)
    return known if len(known) == len(rows) else ()


def slowest_flops(job: JobSpec) -> float | None:
    """Peak dense bf16 FLOP/s of the slowest accelerator of a job, for which the others wait; None where unknown."""
    peaks = [instance_bf16_flops(row) for row in machines(job)]
    known = [peak for peak in peaks if peak is not None]
    return min(known) if known and len(known) == len(peaks) else None


def smallest_accelerator(job: JobSpec) -> Instance | None:
    """The type whose GPUs or NeuronCores have the least memory; None where not all nodes have some that the table
    knows."""
    rows = machines(job)
    return min(rows, key=lambda row: row.accelerator_gib) if rows and all(row.accelerator for row in rows) else None
