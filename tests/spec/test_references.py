"""References between jobs, and the places a task reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from sm_llm.errors import SpecError
from sm_llm.spec.base import SpecModel, location_use
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.references import outputs, patterns, references, resolve, sources, step_dependencies, workflow_job

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def test_places_that_a_task_writes_to_and_patterns_that_it_reads() -> None:
    sinks = {"tensorboard": {"folder": "/board"}, "mlflow": {"tracking_uri": "databricks"}}
    training = {
        "kind": "train", "max_steps": 1, "logging": {"sinks": sinks},
        "data": {"format": "stream", "dataset": "json", "data_files": ["/c4/*.gz", "https://h/b"], "seq_length": 8},
        "parallelism": {"strategy": "nxd", "compile_cache": "/cache"},
    }  # fmt: skip
    for prefix, task in (("task", training), ("task.training", {"kind": "precompile", "training": training})):
        spec = JobSpec.model_validate({"name": "j", "task": task})
        assert outputs(spec) == {
            f"{prefix}.parallelism.compile_cache": "/cache",
            f"{prefix}.logging.sinks.tensorboard.folder": "/board",
            f"{prefix}.logging.sinks.mlflow.tracking_uri": "databricks",
        }
        assert patterns(spec) == {
            f"{prefix}.data.data_files.0": "/c4/*.gz",
            f"{prefix}.data.data_files.1": "https://h/b",
        }


NOT_LOCATIONS = {
    "data.config_name", "data.dataset", "data.split", "data.text_field", "data.validation_split",
    "logging.sample_prompt", "mlflow.experiment", "model.config", "model.preset", "train_tokenizer.end_token",
    "task.args", "task.checkpoint_folder", "task.entry", "task.exclude", "task.group", "task.image_uri",
    "task.include", "task.model", "task.output_folder", "task.text_field", "wandb.entity", "wandb.project",
}  # fmt: skip
"""Texts of a task that name no folder or file of their own."""


def texts(block: type[SpecModel], name: str) -> Iterator[tuple[str, bool]]:
    """Every field of a block that takes text, by the last two parts of its path, and whether it is a place."""
    for key, field in block.model_fields.items():
        inside = list(parts(field.annotation))
        if str in inside:
            yield f"{name}.{key}", location_use(field) is not None
        for part in inside:
            if isinstance(part, type) and issubclass(part, SpecModel):
                yield from texts(part, key)


def parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from parts(part)


def test_every_text_of_a_task_is_a_place_or_known_to_be_none() -> None:
    """What a backend mounts follows from these marks: a new field of a folder must not be forgotten."""
    blocks = [it for it in parts(JobSpec.model_fields["task"].annotation) if isinstance(it, type)]
    found = {name: it for block in blocks if issubclass(block, SpecModel) for name, it in texts(block, "task")}
    assert {it for it, is_location in found.items() if not is_location} == NOT_LOCATIONS


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
