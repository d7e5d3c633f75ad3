"""Checkpoints of a run as the source of a conversion: RUN@STEP, and RUN for its newest one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from safetensors.numpy import load_file

from sm_llm.convert.api import convert
from sm_llm.convert.files.torch_writer import TorchFile, state_pickle
from sm_llm.convert.work import MANIFEST
from sm_llm.errors import ConversionRefused
from sm_llm.runs.run_record import RunRecord
from sm_llm.storage.publication.publish import find_newest, new_save, publish
from sm_llm.storage.uri import open_store
from tests.convert.models import CONFIGS, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.storage.base import Store


SPEC = {"name": "another", "task": {"kind": "train"}, "backend": {"name": "local"}}


def publish_checkpoint(store: Store, folder: Path, step: int, seed: int) -> Path:
    """A checkpoint as strategy nxd publishes it, below ``folder``; returns the model of its weights."""
    model = write_model(folder / f"model-{step}", {**CONFIGS["llama"], "rope_theta": 10_000.0 + seed})
    data = folder / f"saved-{step}"
    tag = data / f"step_{step}"
    convert(model, tag, to="nxd", tensor_parallel_degree=2)
    (tag / "optim").mkdir()
    (tag / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(b"not read")
    for name in ("checkpoint", "done"):
        (tag / name).write_text("1")
    (data / "rank-00000.json").write_text("{}")
    save = new_save("run", step, world_size=2, node_count=1)
    publish(store, save, data, node=0, leader=True, gather=lambda value: [value])
    return model


def is_equal(first: Path, second: Path) -> bool:
    """Whether two models have the same config, and the same tensors bit for bit."""
    one, other = (load_file(it / "model.safetensors") for it in (first, second))
    tensors = one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
    return tensors and (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    for step in (12, 3):
        publish_checkpoint(open_store(folder), tmp_path, step, step)
    return folder


def test_a_step_of_a_run_and_its_newest_are_converted(run: Path, tmp_path: Path) -> None:
    report = convert(f"{run}@3", tmp_path / "three", to="hf")
    assert any("step-00000003" in note for note in report.notes)
    convert(run, tmp_path / "newest", to="hf")
    assert is_equal(tmp_path / "three", tmp_path / "model-3")
    assert is_equal(tmp_path / "newest", tmp_path / "model-12")
    assert not is_equal(tmp_path / "three", tmp_path / "newest")


def test_a_step_that_is_not_there_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionRefused, match="does not have a checkpoint of step 4"):
        convert(f"{run}@4", tmp_path / "model", to="hf")


def test_a_commit_that_does_not_fit_its_files_is_passed_over(run: Path, tmp_path: Path) -> None:
    commit = find_newest(open_store(run)).commit
    assert commit is not None
    (run / commit.save.data_prefix / "step_12" / MANIFEST).write_text("{}")
    convert(run, tmp_path / "newest", to="hf")
    assert is_equal(tmp_path / "newest", tmp_path / "model-3")


def test_a_file_that_is_not_what_was_published_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    commit = find_newest(open_store(run)).commit
    assert commit is not None
    file = max((run / commit.save.data_prefix / "step_12" / "model").rglob("*.pt"), key=lambda it: it.stat().st_size)
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 1
    file.write_bytes(held)
    with pytest.raises(ConversionRefused, match="has other content than was published") as caught:
        convert(run, tmp_path / "newest", to="hf")
    assert file.name in str(caught.value)
    assert not (tmp_path / "newest").exists()


def test_a_checkpoint_of_another_run_is_none_of_this_one(run: Path, tmp_path: Path) -> None:
    record = RunRecord(version=1, run_id="another", name="another", created=1.0, spec=SPEC, spec_digest="0" * 16)
    (run / "run.json").write_text(record.model_dump_json())
    with pytest.raises(ConversionRefused, match="does not have a checkpoint of step 3"):
        convert(f"{run}@3", tmp_path / "three", to="hf")


def test_a_folder_with_the_form_of_a_step_is_a_folder(tmp_path: Path) -> None:
    model = write_model(tmp_path / "source", CONFIGS["llama"])
    convert(model, tmp_path / "shards@3", to="nxd", tensor_parallel_degree=2)
    convert(tmp_path / "shards@3", tmp_path / "back", to="hf")
    assert is_equal(tmp_path / "back", model)


def test_several_tags_in_one_folder_are_still_ambiguous(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "saved-3"
    other = data / "step_9" / "model"
    other.mkdir(parents=True)
    TorchFile(other / "dp_rank_00_tp_rank_00_pp_rank_00.pt", "x", state_pickle([])).close()
    with pytest.raises(ConversionRefused, match="holds 2 checkpoints: step_3, step_9"):
        convert(data, tmp_path / "model", to="hf")
