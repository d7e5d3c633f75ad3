"""References between jobs, and the places a task reads."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.references import references, resolve, sources, step_dependencies, workflow_job


def job(**task: Any) -> JobSpec:
    data = {"format": "rows", "train": "inputs.rows/train", "validation": "steps.prepare.output", "seq_length": 8}
    train = {"kind": "train", "max_steps": 1, "data": data, "tokenizer": "inputs.tok", **task}
    return JobSpec.model_validate({"name": "j", "task": train, "inputs": {"rows": "/rows/", "tok": "/tok"}})


def test_references_become_places_with_their_sub_folders() -> None:
    resolved = resolve(job(), {}, {"prepare": "/runs/p/final"})
    assert sources(resolved) == {
        "task.tokenizer": "/tok",
        "task.data.train": "/rows/train",
        "task.data.validation": "/runs/p/final",
    }
    assert references(resolved) == []


def test_the_reader_may_have_inputs_elsewhere() -> None:
    assert sources(resolve(job(), {"rows": "/channel"}, {"prepare": "/p"}))["task.data.train"] == "/channel/train"


def test_an_input_may_be_the_output_of_a_step() -> None:
    spec = job().model_copy(update={"inputs": {"rows": "steps.prepare.output/data", "tok": "/t"}})
    resolved = resolve(spec, {}, {"prepare": "/p"})
    assert resolved.inputs == {"rows": "/p/data", "tok": "/t"}
    assert sources(resolved)["task.data.train"] == "/p/data/train"


def test_every_unknown_reference_is_named() -> None:
    spec = job(model={"path": "inputs.model"}).model_copy(update={"inputs": {}})
    with pytest.raises(SpecError) as caught:
        resolve(spec, {"rows": "/r"}, {})
    assert [fault.path for fault in caught.value.issues] == [
        "task.model.path",
        "task.tokenizer",
        "task.data.validation",
    ]


def test_text_that_only_looks_alike_stays() -> None:
    prompt = "inputs.rows are nice"
    spec = job(logging={"sample_prompt": prompt}, model={"path": "my.inputs.rows", "config": {"note": "steps.x"}})
    resolved = resolve(spec, {}, {"prepare": "/p"})
    assert resolved.task.logging.sample_prompt == prompt  # type: ignore[union-attr]
    assert sources(resolved)["task.model.path"] == "my.inputs.rows"


def test_sources_of_every_task_kind() -> None:
    prepare = JobSpec.model_validate(
        {"name": "p", "task": {"kind": "prepare", "sources": ["/a", "/b"], "tokenizer": "/t", "seq_length": 8}}
    )
    assert sources(prepare) == {"task.sources.0": "/a", "task.sources.1": "/b", "task.tokenizer": "/t"}
    for start, path in (({"pretrained": "/w"}, "pretrained"), ({"checkpoint": "/r@5"}, "checkpoint")):
        assert sources(job(start=start))[f"task.start.{path}"] == start[path]
    assert "task.start" not in sources(job(start="scratch"))


def workflow() -> WorkflowSpec:
    train = job().task
    prepare = {"kind": "prepare", "sources": ["/a"], "seq_length": 8}
    return WorkflowSpec.model_validate(
        {
            "name": "w",
            "storage": "/s",
            "compute": {"processes_per_instance": 2},
            "environment": {"A": "1", "B": "1"},
            "steps": {
                "prepare": {"task": prepare, "compute": {"processes_per_instance": 1}},
                "other": {"task": prepare},
                "train": {"task": train, "after": ["other"], "inputs": {"rows": "/r"}, "environment": {"B": "2"}},
            },
        }
    )


def test_a_step_is_a_job_of_its_own() -> None:
    train = workflow_job(workflow(), "train")
    assert train.name == "w-train"
    assert train.storage == "/s"
    assert train.environment == {"A": "1", "B": "2"}
    assert train.inputs == {"rows": "/r"}
    assert train.compute.world_size == 2
    assert workflow_job(workflow(), "prepare").compute.world_size == 1


def test_a_step_depends_on_what_it_names_and_what_it_refers_to() -> None:
    assert step_dependencies(workflow(), "train") == {"other", "prepare"}
    assert step_dependencies(workflow(), "prepare") == set()
