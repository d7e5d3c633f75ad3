"""A program's requirements.txt: installed by us on every path, and never over what the image owns."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING

import pytest
from worker_jobs import events, result_folder

from sm_llm.errors import RunFailed
from sm_llm.worker.inputs.requirements import install
from tests.fixtures.wheels import wheel
from tests.worker.test_script import Job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

PROGRAM = """
import json, os, tinystock
with open(os.path.join(os.environ["SM_LLM_OUTPUT"], "argv.json"), "w") as stream:
    json.dump([str(tinystock.answer)], stream)
"""


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of the package index; pip is configured by its own variables, as in a job."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder)
    wheel(folder, "needy", needs="tinystock==1.0")
    wheel(folder, "greedy", needs="torch==0.0.1")
    wheel(folder, "torch", "0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.parametrize("setup", [None, ""], ids=["none", "empty"])
def test_SR01_SR02_SR04_requirements_are_installed_and_reported_with_or_without_a_setup_py(
    tmp_path: Path, setup: str | None
) -> None:
    job = Job(tmp_path, PROGRAM)
    (job.source / "requirements.txt").write_text("needy  # and what it needs\n")
    if setup is not None:
        (job.source / "setup.py").write_text(setup)
    assert job.run() == 0
    assert job.argv == ["42"]
    summary = json.loads((result_folder(job.folder) / "sm_llm.json").read_text())
    assert sorted(summary["installed"]) == ["needy==1.0", "tinystock==1.0"]
    assert any("installed for the program: " in event["message"] for event in events(job.folder, "notice"))


def test_what_the_image_has_is_not_installed_again(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch\npydantic>=2\n")
    assert install(tmp_path, tmp_path / "packages", None) == []
    assert not (tmp_path / "packages").exists()


def test_SR08_a_requirement_that_brings_another_torch_is_refused_with_the_images(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("greedy\n")
    with pytest.raises(RunFailed, match=r"requirements.txt: cannot be installed") as caught:
        install(tmp_path, tmp_path / "packages", None)
    assert "greedy 1.0 depends on torch==0.0.1; The user requested (constraint) torch" in str(caught.value)
    assert not (tmp_path / "packages").exists()
    assert metadata.version("torch") != "0.0.1"


def test_SR04_a_package_that_is_not_there_is_named_with_the_file(tmp_path: Path) -> None:
    job = Job(tmp_path, PROGRAM)
    (job.source / "requirements.txt").write_text("tinystock==9.9\n")
    assert job.run() == 1
    assert "requirements.txt: cannot be installed" in job.failure
    assert "tinystock==9.9" in job.failure


def test_a_requirement_by_its_address_is_installed_from_there(tmp_path: Path, index: Path) -> None:
    (tmp_path / "requirements.txt").write_text(f"{index / 'tinystock-1.0-py3-none-any.whl'}\n")
    assert install(tmp_path, tmp_path / "packages", None) == ["tinystock==1.0"]
    assert (tmp_path / "packages" / "tinystock.py").is_file()


def test_SR21_a_private_index_is_pips_own_setting_and_shown_nowhere(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("tinystock\n")
    environ = {"PIP_INDEX_URL": "https://me:password@nowhere.invalid/simple", "PIP_RETRIES": "0", "PIP_TIMEOUT": "1"}
    with pytest.raises(RunFailed) as caught:
        install(tmp_path, tmp_path / "packages", None, environ)
    assert "password" not in str(caught.value)
