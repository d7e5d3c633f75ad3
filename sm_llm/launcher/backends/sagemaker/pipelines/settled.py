"""Fields that no variable can change: the request of a job was made from them, so its worker would refuse a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import settled_issue
from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.request.distribution import distribution
from sm_llm.launcher.images.images import stack_of
from sm_llm.spec.base import SpecModel
from sm_llm.spec.schema import constant

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec

PROBLEM = "is settled at launch: the request starts the processes with it"


def launched(job: JobSpec) -> tuple[object, ...]:
    """What of a request follows from fields that hyperparameters can change."""
    return distribution(job), stack_of(job)


def variable_issue(job: JobSpec, path: str) -> Issue | None:
    """Why ``path`` cannot be a variable, whose value nobody knows before the job starts; None where it can."""
    if (issue := settled_issue(path)) is not None:
        return issue
    # The field is tried with other values, so no list of fields has to follow what a request is made from.
    usual = launched(job)
    if any(changed is None or launched(changed) != usual for changed in _changed(job, path.split("."))):
        return Issue("field-fixed-by-request", path, PROBLEM, remedy="Write its value into the specification")
    return None


def _changed(node: Any, parts: list[str]) -> Iterator[Any]:
    """Copies of ``node`` with other values at a path; None in place of one that would be of another class."""
    key, *rest = parts
    if isinstance(node, SpecModel) and key in type(node).model_fields:
        if not rest and constant(type(node), key) is not None:
            yield None
            return
        value = getattr(node, key)
        for other in _changed(value, rest) if rest else _others(value):
            yield None if other is None and rest else node.model_copy(update={key: other})
    elif isinstance(node, Mapping) and key in node and not rest:
        yield from ({**node, key: other} for other in _others(node[key]))


def _others(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        # Two other numbers, because one of them may happen to lead to the same launch.
        yield from (value + 1, value + 2)
    elif value is None:
        yield 1
    elif isinstance(value, str):
        yield "another"
