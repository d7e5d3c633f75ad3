"""Issues of a workflow's steps by the names that the user gave: what a step has from its workflow is reported once."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from sm_llm.spec.validation.runner import is_code, is_same, settle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.errors import Issue
    from sm_llm.spec.job import WorkflowSpec

_SHARED = ("name", "backend", "storage", "storage_options")


def gathered(
    workflow: WorkflowSpec, found: Mapping[str, Sequence[Issue]], earlier: Sequence[Issue] = ()
) -> Iterator[Issue]:
    """Issues of the steps' jobs (step -> issues) as issues of the workflow, but none that ``earlier`` holds.

    One of a field that all steps share names the steps that it is about, unless it is about all of them.
    """
    named = {step: [_named(workflow, step, issue) for issue in issues] for step, issues in found.items()}
    for issue in settle(chain.from_iterable(named.values()), earlier):
        steps = [step for step, issues in named.items() if any(is_same(issue, it) for it in issues)]
        some = not issue.path.startswith("steps.") and len(steps) < len(workflow.steps)
        yield replace(issue, message=f"{issue.message} (step {', '.join(steps)})") if some else issue


def _named(workflow: WorkflowSpec, step: str, issue: Issue) -> Issue:
    names = (name if is_code(name) else written(workflow, step, name) for name in issue.blocked_by)
    return replace(issue, path=written(workflow, step, issue.path), blocked_by=tuple(names))


def written(workflow: WorkflowSpec, step: str, path: str) -> str:
    """Where the user writes the field ``path`` of a step's job: in the step, or in the workflow."""
    block, _, rest = path.partition(".")
    own = workflow.steps[step]
    if block in ("environment", "secrets"):
        is_shared = rest not in getattr(own, block)
    else:
        is_shared = block in _SHARED or (block == "compute" and own.compute is None)
    return path if is_shared else f"steps.{step}.{path}"
