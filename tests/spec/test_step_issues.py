"""Faults of a workflow's steps under the paths where the user wrote the values."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.load import load
from sm_llm.spec.validation.runner import gathered, written

FETCH: dict[str, Any] = {"kind": "fetch", "source": "hf://org/name@main"}
FLOW: dict[str, Any] = {
    "name": "flow",
    "environment": {"SHARED": "1"},
    "steps": {
        "a": {"task": FETCH, "compute": {"instance_count": 1}, "environment": {"OWN": "1"}},
        "b": {"task": FETCH},
    },
}


@pytest.fixture
def flow() -> WorkflowSpec:
    spec = load(FLOW).spec
    assert isinstance(spec, WorkflowSpec)
    return spec


@pytest.mark.parametrize(
    ("step", "path", "where"),
    [
        ("a", "backend.role", "backend.role"),
        ("a", "storage", "storage"),
        ("a", "task.source", "steps.a.task.source"),
        ("a", "compute.instance_type", "steps.a.compute.instance_type"),
        ("b", "compute.instance_type", "compute.instance_type"),
        ("a", "environment.OWN", "steps.a.environment.OWN"),
        ("a", "environment.SHARED", "environment.SHARED"),
    ],
)
def test_a_field_is_named_where_it_is_written(step: str, path: str, where: str, flow: WorkflowSpec) -> None:
    assert written(flow, step, path) == where


def test_a_shared_fault_is_reported_once_and_names_the_steps_unless_it_is_of_all(flow: WorkflowSpec) -> None:
    everywhere, somewhere = (
        Issue("a-b", "storage", "is none", [1]),
        Issue("a-c", "backend.max_run_seconds", "is missing"),
    )
    found = list(gathered(flow, {"a": [everywhere], "b": [everywhere, somewhere]}))
    assert [(fault.path, fault.message) for fault in found] == [
        ("storage", "is none"),
        ("backend.max_run_seconds", "is missing (step b)"),
    ]
    assert list(gathered(flow, {"a": [everywhere]}, [everywhere])) == []


def test_a_variable_of_the_workflow_is_refused_once() -> None:
    with pytest.raises(SpecError) as caught:
        load({**FLOW, "environment": {"no name": "1"}})
    assert [fault.path for fault in caught.value.issues] == ["environment.no name"]
