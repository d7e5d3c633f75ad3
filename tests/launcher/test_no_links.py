"""Symbolic links are a convenience: where a system or file system has none, everything works without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.launcher.backends.local.container import lay_out, node_environment
from sm_llm.runs.results import RESULT_LINK, link_result
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_store import FolderRunStore
from sm_llm.spec.job import JobSpec

ROOT = Path(__file__).parents[2]
NO_LINKS = """
import os
def refuse(*args, **options):
    raise OSError(38, "symlinks not possible here")
os.symlink = refuse
"""


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise OSError(38, "symlinks not possible here")

    monkeypatch.setattr(os, "symlink", refuse)


@pytest.mark.usefixtures("no_links")
def test_F11_channels_point_to_where_inputs_lie(tmp_path: Path) -> None:
    data = tmp_path / "data ü"
    data.mkdir()
    task = {"kind": "train", "data": {"format": "synthetic", "seq_length": 8}, "max_steps": 1}
    spec = JobSpec.model_validate({"name": "x", "task": task})
    channels = {"train": str(data)}
    job = JobFile(run_id="x", attempt=1, run_uri=str(tmp_path / "run"), spec=spec, spec_digest="d", channels=channels)
    paths = RunPaths(tmp_path / "run")
    container = lay_out(paths, job, 0, "pass")
    assert container.channel("train") == data
    assert node_environment(paths, job, 0, None, 1)["SM_CHANNEL_TRAIN"] == str(data)


def test_channels_are_links_where_there_are_links(tmp_path: Path) -> None:
    task = {"kind": "train", "data": {"format": "synthetic", "seq_length": 8}, "max_steps": 1}
    spec = JobSpec.model_validate({"name": "x", "task": task})
    channels = {"train": str(tmp_path)}
    job = JobFile(run_id="x", attempt=1, run_uri=str(tmp_path / "run"), spec=spec, spec_digest="d", channels=channels)
    channel = lay_out(RunPaths(tmp_path / "run"), job, 0, "pass").channel("train")
    assert channel.is_symlink()
    assert channel.parent.name == "data"


@pytest.mark.parametrize("before", ["nothing", "link", "folder"])
def test_F11_the_result_is_a_folder_of_hard_links(before: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run_store = FolderRunStore(tmp_path / "run")
    link = run_store.root / RESULT_LINK
    locations = [run_store.root / "final" / name for name in ("old", "new")]
    for location in locations:
        (location / "tokenizer").mkdir(parents=True)
        (location / "tokenizer" / "a.json").write_text(location.name)
    if before == "link":
        link_result(run_store, locations[0])
        assert link.is_symlink()
    request.getfixturevalue("no_links")
    if before == "folder":
        link_result(run_store, locations[0])
    link_result(run_store, locations[1])
    assert link.is_dir()
    assert not link.is_symlink()
    assert (link / "tokenizer" / "a.json").read_text() == "new"
    assert (link / "tokenizer" / "a.json").stat().st_ino == (locations[1] / "tokenizer" / "a.json").stat().st_ino


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_F11_a_run_with_data_and_pretrained_weights_needs_no_links(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(NO_LINKS)
    (tmp_path / "rows").mkdir()
    rows = [{"input_ids": [(3 * number + location) % 500 for location in range(16)]} for number in range(8)]
    (tmp_path / "rows" / "a.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"task.data={{format: json_rows, train: {tmp_path}/rows, seq_length: 16}}"
    path = os.pathsep.join([str(tmp_path / "without"), str(ROOT)])
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": path, "COLUMNS": "500"}
    command = [sys.executable, "-m", "sm_llm.cli", "fit", "smoke", data, "task.max_steps=2"]

    def fit(*overrides: str) -> str:
        done = subprocess.run(
            [*command, *overrides], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    fit("name=first")
    (run,) = (tmp_path / "runs").glob("first-*")
    assert not [it for it in run.rglob("*") if it.is_symlink()]
    assert (run / "result" / "config.json").is_file()
    # Its result is sound to start from, whether the folder is named by the run or by a link.
    reported = fit(
        "name=second", f"task.start={{pretrained: {run}/result}}", "task.model.preset=null", "task.model.config={}"
    )
    assert "pretrained" in reported
