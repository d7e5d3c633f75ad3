"""The folder that a run's record names is data: nothing works in it, imports from it or is executed from it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.launcher.backends.local.attempt import python_path
from sm_llm.launcher.lifecycle import begin
from sm_llm.launcher.run import Run
from sm_llm.runs.run_states import RunState
from sm_llm.spec.loading.load import load

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

Fakes = Any
SHADOWS = ("yaml", "random", "select", "queue", "socket", "sitecustomize", "usercustomize")
LEAVES_CWD = "pathlib.Path({!r}).write_text(os.readlink(f'/proc/{{os.getppid()}}/cwd')); put({!r})"
"""A worker that writes down where its supervisor works, and publishes a step or the result."""


def name_folder(run: Run, folder: Path) -> None:
    """As somebody who may write the record would."""
    run.run_store.update(lambda record: record.model_copy(update={"host": {**record.host, "folder": str(folder)}}))


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A folder of somebody else, with files named like modules that leave a mark if they are imported."""
    folder = tmp_path / "evil"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'a').write({name!r})\n")
    return folder


@pytest.fixture
def stopped(fakes: Fakes) -> Run:
    """A run of the user's that has a checkpoint and failed."""
    fakes.use("put(1); raise OSError('no space left')")
    run = fakes.launch()
    assert fakes.end(run) is RunState.FAILED
    return run


@pytest.mark.parametrize("verb", ["resume", "rerun", "branch"])
def test_6_no_process_works_in_or_imports_from_the_recorded_folder(
    fakes: Fakes, stopped: Run, evil: Path, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    name_folder(stopped, evil)
    fakes.use(LEAVES_CWD.format(str(tmp_path / "cwd"), None))
    again = getattr(stopped, verb)()
    assert fakes.end(again) is RunState.COMPLETED, list(again.logs())
    assert (tmp_path / "cwd").read_text() == str(here)
    assert not (tmp_path / "EXECUTED").exists()


def prepared(folder: Path) -> None:
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("some text " * 20)


PREPARE = {"kind": "prepare", "sources": ["texts"], "seq_length": 16}


def sources(run: Run) -> list[str]:
    return JobFile.read(run.paths.job_file).spec.task.sources  # type: ignore[union-attr]


def test_6_relative_inputs_of_a_record_that_somebody_else_wrote_are_those_of_the_working_folder(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched, theirs, here = tmp_path / "launched", tmp_path / "theirs", tmp_path / "here"
    for folder in (launched, theirs, here):
        prepared(folder)
    monkeypatch.chdir(launched)
    fakes.use("put(1); raise OSError('no space left')")
    run = fakes.launch(task=PREPARE)
    fakes.end(run)
    assert sources(run) == [str(launched / "texts")]
    monkeypatch.chdir(here)
    fakes.use("put(None)")
    own = run.rerun()
    assert fakes.end(own) is RunState.COMPLETED, list(own.logs())
    assert sources(own) == [str(launched / "texts")], "the user's own record still says where it was launched"
    name_folder(run, theirs)
    os.chown(run.paths.record, 12345, -1)
    with caplog.at_level(logging.WARNING):
        foreign = Run(run.uri).rerun()
    assert fakes.end(foreign) is RunState.COMPLETED, list(foreign.logs())
    assert sources(foreign) == [str(here / "texts")]
    assert str(theirs) in caplog.text


def test_6_of_a_run_in_S3_only_the_folder_that_this_machine_remembers_counts(
    s3_fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Callable[[str], None]
) -> None:
    launched, theirs, here = tmp_path / "launched", tmp_path / "theirs", tmp_path / "here"
    for folder in (launched, theirs, here):
        prepared(folder)
    monkeypatch.chdir(launched)
    s3_fakes.use("put(None)")
    run = s3_fakes.launch(task=PREPARE)
    s3_fakes.end(run)
    monkeypatch.chdir(here)
    assert Run(run.uri).launch_folder == launched
    name_folder(run, theirs)
    assert Run(run.uri).launch_folder is None
    name_folder(run, launched)
    elsewhere("another-machine")
    assert Run(run.uri).launch_folder is None


def test_a_workflow_finds_its_inputs_without_working_in_the_folder_it_was_launched_from(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, here = tmp_path / "launched", tmp_path / "here"
    prepared(launched)
    here.mkdir()
    monkeypatch.chdir(here)
    spec = {name: value for name, value in fakes.spec(steps={"one": {"task": PREPARE}}).items() if name != "task"}
    run = begin(load(spec), str(fakes.storage), folder=launched)
    assert fakes.end(run) is RunState.COMPLETED, run.status().reason
    assert sources(run.steps["one"]) == [str(launched / "texts")]
    assert run.steps["one"].record.spec["task"]["sources"] == ["texts"]
    assert run.steps["one"].launch_folder == launched


@pytest.mark.parametrize(
    ("given", "kept"),
    [(":/opt/a", ["/opt/a"]), ("", []), (":", []), ("rel:/opt/a:", ["HERE/rel", "/opt/a"]), (".", ["HERE"])],
)
def test_8_an_empty_entry_of_pythonpath_never_makes_the_working_folder_one_of_modules(
    given: str, kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = python_path({"PYTHONPATH": given})["PYTHONPATH"].split(os.pathsep)
    package = str(Path(__file__).resolve().parents[2])
    assert [it for it in entries if it != package and it] == [it.replace("HERE", str(tmp_path)) for it in kept]
    assert "" not in entries or entries == [""]
