"""What this machine offers to local jobs, and how many processes of one that leaves their number out use it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.spec.machines.compute import ComputeSpec
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from sm_llm.spec.loading.tree import Tree

DEVICES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Machine:
    """What this machine offers: CPU cores we may use, and GPU ids as ``CUDA_VISIBLE_DEVICES`` spells them."""

    cpus: int
    gpus: tuple[str, ...] = ()


def this_machine(environ: Mapping[str, str] = os.environ, devices: Path | None = None) -> Machine:
    """Cores of this process's affinity mask and the visible NVIDIA devices; loads no CUDA library."""
    # taskset or a scheduler may leave this process fewer cores than the machine has.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    visible = environ.get(_VISIBLE)
    # An empty value hides all GPUs.
    if visible is not None:
        return Machine(cpus, tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")))
    files = (devices or DEVICES).glob("nvidia[0-9]*")
    numbers = sorted(int(path.name[6:]) for path in files if path.name[6:].isdigit())
    # CUDA numbers the devices that it sees from 0 on, whatever the numbers of their files.
    return Machine(cpus, tuple(str(index) for index in range(len(numbers))))


def with_local_gpus(tree: Tree, environ: Mapping[str, str]) -> None:
    """Give local jobs that train, or start ranks, one process per visible GPU where they leave the number out.

    ``tree`` is a job's or a workflow's, not checked yet. Without a GPU nothing changes: one process is the default.
    """
    steps = tree.value.get("steps")
    holders = [("steps", str(name)) for name in steps] if isinstance(steps, Mapping) else [()]
    for holder in holders:
        block = tree.get(holder)
        if isinstance(block, Mapping) and _uses_gpus(block.get("task")):
            _fill(tree, holder, environ)


def _uses_gpus(task: Any) -> bool:
    """Whether a task, not checked yet, runs once per process."""
    from sm_llm.spec.tasks import kind_starts_ranks

    return isinstance(task, Mapping) and kind_starts_ranks(str(task.get("kind")), str(task.get("entry")))


def _fill(tree: Tree, holder: tuple[str, ...], environ: Mapping[str, str]) -> None:
    from sm_llm.spec.loading.tree import Tree

    # A step's own compute replaces the workflow's, so that is what must be completed.
    above = (*holder, "compute") if not holder or tree.get((*holder, "compute")) is not None else ("compute",)
    compute = tree.get(above) or {}
    # A value of the job's own is what its processes will see; typed without quotes it may be a number yet.
    own = tree.get((*holder, "environment", _VISIBLE))
    own = tree.get(("environment", _VISIBLE)) if own is None else own
    gpus = this_machine(environ if own is None else {**environ, _VISIBLE: str(own)}).gpus
    if not gpus or not isinstance(compute, Mapping):
        return
    if compute.get("processes_per_instance") is not None or compute.get("instance_type") is not None:
        return
    # Simulated nodes share this machine's GPUs.
    nodes = compute.get("instance_count", 1)
    count = max(1, len(gpus) // nodes) if isinstance(nodes, int) and nodes > 0 else 1
    origin = f"this machine's {counted(len(gpus), 'GPU')}"
    if above == ("compute",) and holder:  # other steps keep one process: only this one's compute changes
        for name, value in compute.items():
            place = (*holder, "compute", str(name))
            tree.put(place, Tree(value, {(): tree.origin(("compute", str(name)))}), ComputeSpec)
    tree.put((*holder, "compute", "processes_per_instance"), Tree(count, {(): origin}), ComputeSpec)
