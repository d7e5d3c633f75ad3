"""Running a phase of checks: its checkers in order, without duplicates and without what only follows from other issues.

A phase is a tuple of checkers: functions from the phase's subject (a job, a plan) to its issues. The phases are

    spec      ``spec.validation.check``: what the fields of a specification say together
    model     ``launcher.planning.checks``: the model's config, its weights and the degrees
    data      ``launcher.planning.checks``: rows, text and tokenizer on this machine
    backend   a backend's own: what the place cannot do for the job
    request   a backend's own: what its service would refuse of the request

Interfaces that take more than a specification have phases of their own: the arguments of an SDK's objects, the parts
of a pipeline. Their callers ``refuse`` what the phase finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from sm_llm.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.errors import Issue
    from sm_llm.spec.job import WorkflowSpec

S = TypeVar("S")
Checker = Callable[[S], "Iterable[Issue]"]

_Checker = TypeVar("_Checker", bound=Callable[..., Any])

# Blocks that a workflow has for all of its steps.
_SHARED = ("name", "backend", "storage", "storage_options")


def blocked_by(*names: str) -> Callable[[_Checker], _Checker]:
    """Declare that a checker has nothing to report after an error of one of ``names``: codes, or dotted paths."""

    def declare(checker: _Checker) -> _Checker:
        checker.blocked_by = names  # type: ignore[attr-defined]
        return checker

    return declare


def run(checkers: Sequence[Checker[S]], subject: S, earlier: Sequence[Issue] = ()) -> list[Issue]:
    """The issues of a phase, in the order of its checkers.

    A checker does not run where an issue of ``earlier`` phases, or of a checker before it, blocks it.
    """
    found: list[Issue] = []
    for checker in checkers:
        names: tuple[str, ...] = getattr(checker, "blocked_by", ())
        if not any(blocks(issue, names) for issue in (*earlier, *found)):
            # The issues keep what blocks them, for ``gathered``, which compares them with those of the workflow.
            issues = (replace(it, blocked_by=(*it.blocked_by, *names)) for it in checker(subject))
            found += without_duplicates(issues, (*earlier, *found))
    return found


def refuse(found: Iterable[Issue]) -> None:
    """Raise ``PlanError`` with every issue, where there are any."""
    if issues := list(found):
        raise PlanError(issues)


def without_duplicates(found: Iterable[Issue], earlier: Sequence[Issue] = ()) -> list[Issue]:
    """``found`` in its order, without duplicates and without what an error among ``earlier`` blocks."""
    reported = {_key(issue) for issue in earlier}
    kept: dict[tuple[str, ...], Issue] = {}
    for issue in found:
        key = _key(issue)
        if key not in reported and not any(blocks(other, issue.blocked_by) for other in earlier if issue.blocked_by):
            kept.setdefault(key, issue)
    return list(kept.values())


def _key(issue: Issue) -> tuple[str, ...]:
    """What two issues that report the same have in common; values may differ in how they were written."""
    return (issue.code, issue.path, issue.message, issue.remedy)


def at_new_paths(found: Iterable[Issue], earlier: Sequence[Issue] = ()) -> list[Issue]:
    """The first issue of ``found`` at every path that has no error among ``earlier``."""
    paths = {issue.path for issue in errors_of(earlier)}
    first: dict[str, Issue] = {}
    for issue in found:
        if issue.path not in paths:
            first.setdefault(issue.path, issue)
    return list(first.values())


def at_other_fields(found: Iterable[Issue], earlier: Sequence[Issue]) -> list[Issue]:
    """Those of ``found`` at fields that ``earlier`` reports nothing of; the others may follow from what it reports."""
    return without_duplicates((replace(issue, blocked_by=(*issue.blocked_by, issue.path)) for issue in found), earlier)


def in_other_blocks(found: Iterable[Issue], earlier: Sequence[Issue]) -> list[Issue]:
    """Those of ``found`` in blocks of fields of which ``earlier`` has none; fields that are in no block are alone."""
    blocks_of = {_block(issue.path) for issue in earlier} - {""}
    return [issue for issue in found if _block(issue.path) not in blocks_of]


def _block(path: str) -> str:
    return path.rpartition(".")[0]


def errors_of(found: Iterable[Issue]) -> list[Issue]:
    """The issues that are not warnings."""
    return [issue for issue in found if issue.severity == "error"]


def blocks(issue: Issue, names: Iterable[str]) -> bool:
    """Whether ``issue`` is an error that has one of the names as its code, or whose path overlaps with one of them."""
    return issue.severity == "error" and any(name == issue.code or overlap(name, issue.path) for name in names)


def overlap(first: str, second: str) -> bool:
    """Whether one dotted path is the other, or leads to it."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def is_code(name: str) -> bool:
    """Whether a name of ``blocked_by`` is a code: those have hyphens and no dots, dotted paths have not."""
    return "-" in name and "." not in name


def gathered(
    workflow: WorkflowSpec, found: Mapping[str, Sequence[Issue]], earlier: Sequence[Issue] = ()
) -> Iterator[Issue]:
    """Issues of the steps' jobs (step -> issues) as issues of the workflow, but none that ``earlier`` holds.

    One of a field that all steps share names the steps that it is about, unless it is about all of them.
    """
    # By the workflow's own paths: an issue of a shared field is the same in every step, and ``without_duplicates``
    # keeps one of them.
    named = {step: [_named(workflow, step, issue) for issue in issues] for step, issues in found.items()}
    reporting = {step: {_key(issue) for issue in issues} for step, issues in named.items()}
    for issue in without_duplicates(chain.from_iterable(named.values()), earlier):
        steps = [step for step, keys in reporting.items() if _key(issue) in keys]
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
        # These mappings are merged, so a name belongs to the step where the step gives it.
        is_shared = rest not in getattr(own, block)
    else:
        is_shared = block in _SHARED or (block == "compute" and own.compute is None)
    return path if is_shared else f"steps.{step}.{path}"
