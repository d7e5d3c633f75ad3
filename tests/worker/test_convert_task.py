"""The convert task: weights go to shards and back as jobs, and what was broken off is continued."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file
from worker_jobs import events, job_environment, job_file, result_folder

from sm_llm.convert import work
from sm_llm.storage.publication.publish import find_final
from sm_llm.storage.uri import open_store
from sm_llm.worker.main import main
from tests.convert.models import CONFIGS, write_model

if TYPE_CHECKING:
    from pathlib import Path

TO_NXD = {"to": "nxd", "tensor_parallel_degree": 4, "pipeline_parallel_degree": 2}


def convert_job(run: Path, source: Path, attempt: int = 1, **task: Any) -> dict[str, str]:
    return job_environment(job_file({"kind": "convert", "source": str(source), **task}, run, 1, attempt))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", CONFIGS["llama"])
    return tmp_path / "model"


def weights(folder: Path) -> dict[str, bytes]:
    return {name: it.tobytes() for name, it in load_file(folder / "model.safetensors").items()}


def test_CV01_weights_go_to_shards_and_back_through_two_jobs(model: Path, tmp_path: Path) -> None:
    assert main("convert", convert_job(tmp_path / "there", model, **TO_NXD, verify=True)) == 0
    shards = result_folder(tmp_path / "there")
    assert len(list((shards / "model").glob("*_pp_rank_0[01].pt"))) == 8
    notices = [it["message"] for it in events(tmp_path / "there", "notice")]
    assert any("vocabulary: 101 rows padded with zero rows to 104" in it for it in notices)
    assert any("verified" in it for it in notices)
    assert events(tmp_path / "there", "progress")
    assert main("convert", convert_job(tmp_path / "back", shards, to="hf")) == 0
    assert weights(result_folder(tmp_path / "back")) == weights(model)
    final = find_final(open_store(tmp_path / "back"), run_id="back")
    assert final is not None
    assert (final.meta["kind"], len(final.meta["digest"])) == ("model", 64)


def test_a_conversion_that_was_broken_off_is_continued(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    environ = convert_job(tmp_path / "run", model, **TO_NXD)
    # An error of the disk, behind the last unit: an interrupt would end pytest's own process where it passes.
    with monkeypatch.context() as patch:
        patch.setattr(work, "fsync_path", broken)
        assert main("convert", environ) != 0
    again = {**environ, **convert_job(tmp_path / "run", model, attempt=2, **TO_NXD)}
    again["SAGEMAKER_BASE_DIR"] = environ["SAGEMAKER_BASE_DIR"]
    assert main("convert", again) == 0
    (line,) = [it["message"] for it in events(tmp_path / "run", "notice") if "of them from before" in it["message"]]
    assert line.startswith("wrote 8 files, 8 of them from before")


def test_degrees_that_do_not_fit_end_the_job_with_the_arithmetic(model: Path, tmp_path: Path) -> None:
    wrong = {**TO_NXD, "tensor_parallel_degree": 3}
    assert main("convert", convert_job(tmp_path / "run", model, **wrong)) == 1
    [message] = {it["message"] for it in events(tmp_path / "run", "failed")}
    assert "num_attention_heads 8 / 3 leaves 2" in message


def test_a_degree_that_the_manifest_contradicts_is_refused_on_the_way_back(model: Path, tmp_path: Path) -> None:
    assert main("convert", convert_job(tmp_path / "there", model, **TO_NXD)) == 0
    shards = result_folder(tmp_path / "there")
    assert json.loads((shards / "conversion.json").read_text())["tensor_parallel_degree"] == 4
    assert main("convert", convert_job(tmp_path / "back", shards, to="hf", tensor_parallel_degree=8)) == 1
    [message] = {it["message"] for it in events(tmp_path / "back", "failed")}
    assert "tensor_parallel_degree" in message
