"""The specification classes read as a schema, their documentation, and the table of accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.defaults import UserDefaults
from sm_llm.spec.machines.hardware import ACCELERATORS, peak_flops
from sm_llm.spec.reference.docs import class_doc, field_docs
from sm_llm.spec.schema import block_for, blocks, describe, dotted_paths, tag, tag_values
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.training import RowsData, StreamData

if TYPE_CHECKING:
    from sm_llm.spec.base import SpecModel


def every_class(kind: type[SpecModel], seen: set[type[SpecModel]] | None = None) -> set[type[SpecModel]]:
    seen = set() if seen is None else seen
    if kind not in seen:
        seen.add(kind)
        annotations = [field.annotation for field in kind.model_fields.values()]
        annotations += [inner for outer in annotations for inner in get_args(outer)]
        for block in (block for annotation in annotations for block in blocks(annotation)):
            every_class(block, seen)
    return seen


ROOTS = (JobSpec, WorkflowSpec, UserDefaults)
ALL = sorted({kind for root in ROOTS for kind in every_class(root)}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_class_and_every_field_is_documented(kind: type[SpecModel]) -> None:
    assert class_doc(kind)
    assert [name for name in kind.model_fields if name not in field_docs(kind)] == []


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_class_is_frozen_strict_and_closed(kind: type[SpecModel]) -> None:
    config = kind.model_config
    assert (config.get("frozen"), config.get("strict"), config.get("extra")) == (True, True, "forbid")


def test_the_walk_over_the_classes_reaches_them_all() -> None:
    names = {kind.__name__ for kind in ALL}
    assert {
        "TrainTask",
        "StepSpec",
        "CheckpointStart",
        "LocalOptions",
        "VpcSpec",
        "SageMakerOptions",
        "SmpSpec",
        "NxdSpec",
        "ScriptTask",
    } <= names


def test_a_tagged_union_is_distinguished_by_its_constant() -> None:
    annotation = TrainTask.model_fields["data"].annotation
    assert tag(annotation) == "format"
    assert tag_values(annotation)["rows"] is RowsData
    assert block_for(annotation, {"format": "stream"}) is StreamData
    assert block_for(annotation, {"format": ["x"]}) is None
    assert tag(TrainTask.model_fields["start"].annotation) is None


def test_paths_follow_the_classes_and_the_keys_that_are_there() -> None:
    value: Any = {"steps": {"a": {"task": {"kind": "prepare"}}}}
    paths = set(dotted_paths(WorkflowSpec, value))
    assert ("steps", "a", "task", "sources") in paths
    assert ("steps", "a", "task", "optim") not in paths


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("max_steps", "a whole number or null"),
        ("max_epochs", "a number or null"),
        ("deterministic", "true or false"),
        ("tokenizer", "text or null"),
        ("optim", "a mapping with name, learning_rate"),
    ],
)
def test_types_are_described_in_words(field: str, words: str) -> None:
    assert describe(TrainTask.model_fields[field].annotation).startswith(words)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GH200 480GB", 989e12),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_device_name(device: str, peak: float | None) -> None:
    assert peak_flops(device) == peak


def test_no_accelerator_hides_behind_a_shorter_name() -> None:
    names = [row.name for row in ACCELERATORS]
    hidden = [(a, b) for index, a in enumerate(names) for b in names[index + 1 :] if a in b]
    assert hidden == []
