"""Faults of a workflow's steps by the names that the user gave: what a step has from its workflow is reported once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from sm_llm.errors import Fault
    from sm_llm.spec.job import WorkflowSpec

_SHARED = ("name", "backend", "storage", "storage_options")


def gathered(
    workflow: WorkflowSpec, found: Mapping[str, Sequence[Fault]], reported: Collection[str] = ()
) -> Iterator[Fault]:
    """Faults of the steps' jobs (step -> faults) as faults of the workflow, but none for the paths in ``reported``.

    One of a field that all steps share names the steps that it is about, unless it is about all of them.
    """
    kept: dict[tuple[str, str, str], tuple[Fault, list[str]]] = {}
    for step, faults in found.items():
        for fault in faults:
            named = replace(fault, path=written(workflow, step, fault.path))
            entry = kept.setdefault((named.path, named.problem, named.remedy), (named, []))
            entry[1].append(step)
    for fault, steps in kept.values():
        if fault.path in reported:
            continue
        some = not fault.path.startswith("steps.") and len(set(steps)) < len(workflow.steps)
        yield replace(fault, problem=f"{fault.problem} (step {', '.join(steps)})") if some else fault


def written(workflow: WorkflowSpec, step: str, path: str) -> str:
    """Where the user writes the field ``path`` of a step's job: in the step, or in the workflow."""
    block, _, rest = path.partition(".")
    own = workflow.steps[step]
    if block in ("environment", "secrets"):
        is_shared = rest not in getattr(own, block)
    else:
        is_shared = block in _SHARED or (block == "compute" and own.compute is None)
    return path if is_shared else f"steps.{step}.{path}"
