"""RUN by name, id or specification: where it is searched for, and the error where there is none."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from sm_llm import cli
from sm_llm.errors import SubmitError
from sm_llm.launcher.find_runs import attach

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run

pytestmark = pytest.mark.integration

Fakes = Any


@pytest.fixture
def runs(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """``fakes`` whose runs complete at once, seen from another folder, without defaults of a user."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("SM_LLM_")]:
        monkeypatch.delenv(name)
    fakes.use("put(None)")
    return fakes


def done(runs: Fakes, *overrides: str, **changes: Any) -> Run:
    run: Run = runs.launch(*overrides, new=True, **changes)
    runs.end(run)
    return run


def test_E18_a_name_is_found_in_the_default_storage_and_in_runs_beside_it(
    runs: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = done(runs)
    with pytest.raises(SubmitError) as reported:
        attach("fake")
    assert f"no run 'fake' in {tmp_path / 'here/runs'} (runs there: none)" in str(reported.value)
    assert attach("fake", storage=tmp_path / "runs").id == first.id
    monkeypatch.setenv("SM_LLM_STORAGE", str(tmp_path / "runs"))
    assert attach("fake").id == first.id
    newer = done(runs, storage="./runs")
    assert attach("fake").id == newer.id
    assert attach(first.id).uri == first.uri
    with pytest.raises(SubmitError) as reported:
        attach("other")
    for location, run in ((tmp_path / "runs", first), (tmp_path / "here/runs", newer)):
        assert f"{location} (runs there: {run.id})" in str(reported.value)


def test_E18_a_name_of_several_runs_states_which_and_what_else_is_not_finished(
    runs: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, newest = done(runs), done(runs)
    first.run_store.update(lambda record: record.model_copy(update={"outcome": None}))
    capsys.readouterr()
    assert attach("fake", storage=tmp_path / "runs").id == newest.id
    assert capsys.readouterr().err == f"fake is taken for {newest.id}, its newest run. Not finished: {first.id}\n"
    attach(newest.id, storage=tmp_path / "runs")
    assert capsys.readouterr().err == ""


def test_E18_every_verb_that_takes_a_run_takes_the_storage_it_is_in(runs: Fakes, tmp_path: Path) -> None:
    run = done(runs)
    shown = CliRunner().invoke(cli.app, ["status", "fake", "--storage", str(tmp_path / "runs"), "--json"])
    assert shown.exit_code == 0
    assert run.id in shown.output
    takers = [it for it in cli.app.registered_commands if it.callback and "run" in it.callback.__annotations__]
    assert len(takers) > 10
    for command in takers:
        assert command.callback is not None
        assert "storage" in command.callback.__annotations__, command.callback.__name__


def test_E18_a_specification_means_its_newest_run_in_its_storage(runs: Fakes, tmp_path: Path) -> None:
    first = done(runs)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(runs.spec()))
    other = done(runs, "task.seed=1")
    assert attach("fake", storage=tmp_path / "runs").id == other.id, "of any specification"
    assert attach(file).id == first.id
    file.write_text(yaml.safe_dump(runs.spec(task={**runs.spec()["task"], "seed": 1})))
    assert attach(file).id == other.id
    file.write_text(yaml.safe_dump(runs.spec(task={**runs.spec()["task"], "seed": 2})))
    with pytest.raises(SubmitError, match=r"no run of the specification .*job.yaml as it is now in .*runs there: "):
        attach(file)


def test_12e_5_a_stop_without_a_name_takes_the_run_that_runs(
    runs: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.use("import time\nput(1)\nwhile True:\n    time.sleep(0.05)")
    running = runs.launch(new=True)
    runs.wait_until(lambda: running.checkpoints())
    runs.use("put(None)")
    newest = done(runs)
    capsys.readouterr()
    assert attach(storage=tmp_path / "runs").id == newest.id
    assert capsys.readouterr().err == f"Also running: {running.id}\n"
    result = CliRunner().invoke(cli.app, ["stop", "--now", "--storage", str(tmp_path / "runs")])
    assert f"{running.id} is taken: it is running, and {newest.id}, the newest run, is not" in result.output
    assert f"{running.id} is being killed" in result.output
    assert runs.end(running).is_final
