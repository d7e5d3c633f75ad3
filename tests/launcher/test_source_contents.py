"""A place of another kind than its field reads is refused by the plan: every field, on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.source_contents import WANTED
from sm_llm.spec.base import SpecModel, location_use
from sm_llm.spec.job import JobSpec
from sm_llm.spec.schema import blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TRAIN: dict[str, Any] = {
    "kind": "train", "model": {"preset": "tiny"}, "max_steps": 2, "data": {"format": "synthetic", "seq_length": 16},
}  # fmt: skip
PREPARE: dict[str, Any] = {"kind": "prepare", "sources": ["texts/a.txt"], "seq_length": 8}


def of_data(form: str, field: str) -> Callable[[str], dict[str, Any]]:
    def task(location: str) -> dict[str, Any]:
        return {**TRAIN, "data": {"format": form, "seq_length": 16, "train": "s3://bucket/rows", field: location}}

    return task


TASKS: dict[tuple[str, str], Callable[[str], dict[str, Any]]] = {
    ("RowsData", "train"): of_data("rows", "train"),
    ("RowsData", "validation"): of_data("rows", "validation"),
    ("JsonRowsData", "train"): of_data("json_rows", "train"),
    ("JsonRowsData", "validation"): of_data("json_rows", "validation"),
    ("TrainTask", "tokenizer"): lambda location: {**TRAIN, "tokenizer": location},
    ("PrepareTask", "tokenizer"): lambda location: {**PREPARE, "tokenizer": location},
    ("PrepareTask", "sources"): lambda location: {**PREPARE, "sources": [location]},
    ("ModelSpec", "path"): lambda location: {**TRAIN, "model": {"path": location}},
    ("PretrainedStart", "pretrained"): lambda location: {**TRAIN, "start": {"pretrained": location}},
    ("CheckpointStart", "checkpoint"): lambda location: {**TRAIN, "start": {"checkpoint": location}},
    ("ConvertTask", "source"): lambda location: {"kind": "convert", "to": "hf", "source": location},
    ("ConvertTask", "config"): lambda location: {
        "kind": "convert",
        "to": "hf",
        "source": "s3://bucket/w",
        "config": location,
    },
    ("ScriptTask", "source"): lambda location: {"kind": "script", "entry": "train.py", "source": location},
}
LAYOUTS = ("nowhere", "empty", "pictures", "pictures/a.png", "nothing", "broken")


def source_fields_of(kind: type[SpecModel], seen: set[type]) -> Iterator[tuple[str, str]]:
    if kind in seen:
        return
    seen.add(kind)
    for name, field in kind.model_fields.items():
        if location_use(field) == "source":
            yield kind.__name__, name
        for inner in blocks(field.annotation):
            yield from source_fields_of(inner, seen)


def test_12e_1_every_field_that_names_a_place_has_a_row() -> None:
    assert set(WANTED) == set(source_fields_of(JobSpec, set())) == set(TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    for name in ("empty", "pictures", "nothing", "broken", "texts", "lines", "rows"):
        (root / name).mkdir()
    (root / "texts/a.txt").write_text("text")
    (root / "pictures/a.png").write_bytes(b"png")
    (root / "lines/a.json").write_text('{"input_ids": [1, 2]}\n')
    (root / "rows/rows.arrow").write_text("x")
    for name in ("state.json", "dataset_info.json", "config.json", "tokenizer.json", "a.jsonl"):
        (root / "broken" / name).write_text("{")
    for name in ("a.txt", "a.json", "a.jsonl", "a.safetensors", "tokenizer.json", "config.json"):
        (root / "nothing" / name).touch()
    return root


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def refused(task: dict[str, Any], **more: Any) -> dict[str, str]:
    try:
        plan({"name": "a", "task": task, **more})
    except (PlanError, SpecError) as error:
        return {issue.path: str(issue) for issue in error.issues}
    return {}


@pytest.mark.parametrize("field", TASKS, ids=".".join)
def test_12e_1_a_place_of_another_kind_is_refused(field: tuple[str, str]) -> None:
    for location in LAYOUTS:
        found = refused(TASKS[field](location))
        assert found, location
        assert all(path.startswith("task.") for path in found), found


def test_12e_1_a_file_of_the_right_kind_names_the_folder_to_give() -> None:
    found = refused(of_data("json_rows", "train")("lines/a.json"))["task.data.train"]
    assert "is a file, where a folder of line files" in found
    assert "Give the folder that holds it: " in found
    assert found.endswith("/lines")
    assert refused(of_data("json_rows", "train")("lines")) == {}


@pytest.mark.parametrize(
    ("info", "state", "problem"),
    [
        ("{}", {"_data_files": [{"filename": "rows.arrow"}]}, "names no column input_ids (columns: none)"),
        ('{"features": [1]}', {"_data_files": [{"filename": "rows.arrow"}]}, "must be JSON objects"),
        ('{"features": {"text": {}}}', {"_data_files": [{"filename": "rows.arrow"}]}, "(columns: text)"),
        ('{"features": {"input_ids": {}}}', {"_data_files": []}, "holds nothing: 0 empty files"),
        ('{"features": {"input_ids": {}}}', {"_data_files": [{"filename": "a.arrow"}]}, "lists a.arrow, which is not"),
        ("{", {}, "not readable as JSON"),
    ],
)
def test_rows_whose_small_files_are_damaged_are_refused(info: str, state: Any, problem: str, folder: Path) -> None:
    (folder / "rows/dataset_info.json").write_text(info)
    (folder / "rows/state.json").write_text(json.dumps(state))
    assert problem in refused(of_data("rows", "validation")("rows"))["task.data.validation"]


def test_the_training_of_a_precompile_task_and_a_named_input_are_read_as_well() -> None:
    assert "task.data.train" in refused(of_data("json_rows", "train")("inputs.a"), inputs={"a": "texts"})
    precompile = {"kind": "precompile", "training": of_data("rows", "train")("texts")}
    assert "task.training.data.train" in refused(precompile)


def test_a_folder_of_a_cluster_is_left_to_the_job() -> None:
    cluster = {"name": "slurm", "shared_folder": "/fsx/s", "virtual_environment": "/fsx/v"}
    more = {"storage": "s3://bucket/runs", "compute": {"processes_per_instance": 1}}
    task = of_data("rows", "train")("/fsx/not-here/rows")
    assert refused(task, backend={**cluster, "ssh_host": "login"}, **more) == {}
    assert "task.data.train" in refused(task, backend=cluster, **more)
