"""How many processes a local job gets that leaves their number out: one per visible GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sm_llm.spec.machines.compute import ComputeSpec
from sm_llm.spec.machines.machine import VISIBLE, this_machine
from sm_llm.spec.tasks import kind_starts_ranks
from sm_llm.spec.tree import Tree
from sm_llm.terminal import counted


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
    return isinstance(task, Mapping) and kind_starts_ranks(str(task.get("kind")), str(task.get("entry")))


def _fill(tree: Tree, holder: tuple[str, ...], environ: Mapping[str, str]) -> None:
    # A step's own compute replaces the workflow's, so that is what must be completed.
    above = (*holder, "compute") if not holder or tree.get((*holder, "compute")) is not None else ("compute",)
    compute = tree.get(above) or {}
    # A value of the job's own is what its processes will see; typed without quotes it may be a number yet.
    own = tree.get((*holder, "environment", VISIBLE))
    own = tree.get(("environment", VISIBLE)) if own is None else own
    gpus = this_machine(environ if own is None else {**environ, VISIBLE: str(own)}).gpus
    if not gpus or not isinstance(compute, Mapping):
        return
    # An instance type decides the number itself, and a stated number is the user's.
    if compute.get("processes_per_instance") is not None or compute.get("instance_type") is not None:
        return
    # Simulated nodes share this machine's GPUs.
    nodes = compute.get("instance_count", 1)
    count = max(1, len(gpus) // nodes) if isinstance(nodes, int) and nodes > 0 else 1
    origin = f"this machine's {counted(len(gpus), 'GPU')}"
    if above == ("compute",) and holder:  # other steps keep one process: only this one's compute changes
        for name, value in compute.items():
            location = (*holder, "compute", str(name))
            tree.put(location, Tree(value, {(): tree.origin(("compute", str(name)))}), ComputeSpec)
    tree.put((*holder, "compute", "processes_per_instance"), Tree(count, {(): origin}), ComputeSpec)
