"""Faults of the machines that a job on SageMaker asks for: nothing else can be reckoned while they are not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Fault
from sm_llm.spec.backends import SageMakerBackend
from sm_llm.spec.machines.gpus import machine_types
from sm_llm.spec.machines.hardware import instance, nearest_instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.job import JobSpec


def compute_faults(job: JobSpec) -> Iterator[Fault]:
    """Faults of the instance type, and of those of all groups. The number of processes follows from it."""
    if not isinstance(job.backend, SageMakerBackend):
        return
    path, name = "compute.instance_type", job.compute.instance_type
    if name is None:
        own = machine_types(job)
        remedy = f"Write {own[0]}, a type of backend.instance_groups" if own else "For example ml.p5.48xlarge"
        yield Fault(path, "no instance type", None, remedy)
    else:
        yield from _type_faults(path, name, job.compute.processes_per_instance)
    for index, group in enumerate(job.backend.instance_groups):
        where = f"backend.instance_groups.{index}.instance_type"
        yield from _type_faults(where, group.instance_type, job.compute.processes_per_instance)


def _type_faults(path: str, name: str, processes: int | None) -> Iterator[Fault]:
    meant = nearest_instance(name)
    if name in ("local", "local_gpu"):
        problem = "is the local mode of the SDK, which is not supported"
        remedy = "Emulate the training job here: backend.name=local backend.contract=sagemaker; or write an ml. type"
        yield Fault(path, problem, name, remedy)
    elif not name.startswith("ml."):
        yield Fault(path, "SageMaker's names begin with ml.", name, f"Write {meant.name if meant else f'ml.{name}'}")
    elif instance(name) is None and processes is None:
        problem = "is not in the table of instance types, so it is not known how many processes a node runs"
        known = "give compute.processes_per_instance: its accelerators, or 1 if it has none"
        remedy = f"Did you mean {meant.name}? If not, {known}" if meant else f"If it is right, {known}"
        yield Fault(path, problem, name, remedy)
