"""Remedies of issues between settings of strategy fsdp: whoever follows one gets no further issue."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.launcher.planner import plan

JOB: dict[str, Any] = {
    "name": "remedies",
    "task": {
        "kind": "train", "model": {"preset": "tiny"}, "data": {"format": "synthetic", "seq_length": 64, "rows": 32},
        "max_steps": 1,
    },
    "compute": {"processes_per_instance": 2},
}  # fmt: skip
FP8 = {**JOB, "task": {**JOB["task"], "precision": {"compute": "fp8"}}}
SPLIT = "task.parallelism.tensor_parallel_degree"
KIND = "task.parallelism.activation_checkpointing"
OFFLOADED = "task.parallelism.offload_activations"
OVERLAPPED = "task.parallelism.async_tensor_parallel"
COMPILE = "task.precision.compile"


@pytest.mark.parametrize(
    ("fields", "remedy", "ways"),
    [
        (
            {SPLIT: 2, OFFLOADED: True, COMPILE: True},
            "Leave offload_activations out, or set task.precision.compile to false",
            [{OFFLOADED: False}, {COMPILE: False}],
        ),
        (
            {SPLIT: 2, OFFLOADED: True, COMPILE: True, KIND: "full"},
            "Leave offload_activations out and use none or selective, or set task.precision.compile to false",
            [{OFFLOADED: False, KIND: "none"}, {OFFLOADED: False, KIND: "selective"}, {COMPILE: False}],
        ),
        (
            {SPLIT: 2, COMPILE: True, KIND: "full"},
            "Use none or selective, or set task.precision.compile to false",
            [{KIND: "none"}, {KIND: "selective"}, {COMPILE: False}],
        ),
        ({SPLIT: 2, OFFLOADED: True, COMPILE: True, KIND: "none"}, "Leave it out", [{OFFLOADED: False}]),
        (
            {OFFLOADED: True, KIND: "none"},
            "Leave it out, or use activation_checkpointing full or every_nth",
            [{OFFLOADED: False}, {KIND: "full"}, {KIND: "every_nth"}],
        ),
        ({SPLIT: 2, COMPILE: False, KIND: "budget"}, "Use selective", [{KIND: "selective"}]),
        (
            {SPLIT: 2, OVERLAPPED: True},
            "Set task.precision.compile to true, or leave it out",
            [{COMPILE: True}, {OVERLAPPED: False}],
        ),
        ({SPLIT: 2, OVERLAPPED: True, KIND: "full"}, "Leave it out", [{OVERLAPPED: False}]),
        ({OVERLAPPED: True}, "Leave it out", [{OVERLAPPED: False}]),
    ],
)
def test_a_remedy_of_an_issue_leads_to_a_plan(fields: dict[str, Any], remedy: str, ways: list[dict[str, Any]]) -> None:
    with pytest.raises(SpecError) as error:
        plan(JOB, **fields)
    assert [it.remedy for it in error.value.issues] == [remedy]
    for way in ways:
        assert plan(JOB, **{**fields, **way})


@pytest.mark.parametrize(
    ("fields", "remedies"),
    [
        # Two processes share each sequence: 48 tokens are 24 for each, and 48 is a multiple of 16.
        (
            {"task.data.seq_length": 48, "task.parallelism.context_parallel_degree": 2},
            ("Use a multiple of 32, or set task.micro_batch_size to a multiple of 2", "seq_length=32", "micro=2"),
        ),
        # Left open, the micro-batch may be one sequence.
        (
            {"task.data.seq_length": 24, "task.micro_batch_size": "auto"},
            ("Use a multiple of 16, or set task.micro_batch_size to a multiple of 2", "seq_length=16", "micro=2"),
        ),
        ({"task.data.seq_length": 12, "task.micro_batch_size": 2}, ("a multiple of 8,", "seq_length=8", "micro=4")),
    ],
)
def test_lengths_that_are_advised_are_taken(fields: dict[str, Any], remedies: tuple[str, str, str]) -> None:
    with pytest.raises(SpecError) as error:
        plan(FP8, **fields)
    (issue,) = error.value.issues
    assert (issue.code, remedies[0] in issue.remedy) == ("fp8-tokens-not-divisible", True), issue.remedy
    for name, value in (it.split("=") for it in remedies[1:]):
        path = "task.data.seq_length" if name == "seq_length" else "task.micro_batch_size"
        assert plan(FP8, **{**fields, path: int(value)})
