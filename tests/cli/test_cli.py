"""The command line as a person meets it: words, exit codes, and nothing but JSON where JSON was asked for."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from sm_llm import cli

JOB = {
    "name": "job",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64},
        "max_steps": 4,
    },
}

Command = Callable[..., subprocess.CompletedProcess[str]]


def sm_llm(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``sm-llm`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "sm_llm.cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Run ``sm-llm`` in this process, where nothing depends on a process of its own."""
    threshold = gc.get_threshold()

    def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["sm-llm", *arguments])
        with contextlib.chdir(folder or "."), pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), printed.out, printed.err)

    yield run
    gc.set_threshold(*threshold)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with ``job.yaml``."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return tmp_path


def test_every_verb_is_one_python_function() -> None:
    callbacks = [command.callback for command in cli.app.registered_commands]
    assert {callback.__name__ for callback in callbacks if callback} == set(cli.VERBS)
    for module in cli.VERBS.values():
        module, _, path = module.partition(":")
        function = import_module(module)
        for name in path.split("."):
            function = getattr(function, name)
        assert callable(function) or isinstance(function, property)
        assert function.__doc__


def test_help_teaches_how_to_begin(command: Command) -> None:
    done = sm_llm("--help")
    assert done.returncode == 0
    for words in ("sm-llm fit tiny-local", "sm-llm plan", "sm-llm init", *cli.VERBS):
        assert words in done.stdout
    for verb in ("fit", "plan", "prepare", "logs", "init"):
        assert "Example" in command(verb, "--help").stdout


def test_a_plan_as_table_and_as_json(command: Command, folder: Path) -> None:
    table = command("plan", "job.yaml", folder=folder)
    assert table.returncode == 0, table.stderr
    for words in ("6,163,712 parameters", "4 steps", "torch.distributed.run", "FLOPs per token"):
        assert words in table.stdout
    done = command("plan", "job.yaml", "task.max_steps=7", "--json", folder=folder)
    (plan,) = json.loads(done.stdout)
    assert plan["derived"]["total_steps"] == 7
    assert done.stderr == ""


def test_a_dry_run_prints_what_would_be_submitted_and_writes_nothing(folder: Path) -> None:
    done = sm_llm("fit", "job.yaml", "--dry-run", "--json", folder=folder)
    (submission,) = json.loads(done.stdout)
    assert submission["backend"] == "local"
    assert submission["job"]["spec"]["task"]["max_steps"] == 4
    assert "torch.distributed.run" in submission["request"]["nodes"][0]["argv"]
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize("verb", ["plan", "fit", "show"])
def test_a_wrong_specification_is_one_message_without_a_traceback_and_exit_code_2(
    command: Command, folder: Path, verb: str
) -> None:
    done = command(verb, "job.yaml", "task.optim.learning_rat=1e-3", "task.max_step=2", folder=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "learning_rate" in done.stderr
    assert "max_steps" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_error_is_a_message_and_exit_code_2(command: Command, folder: Path) -> None:
    done = command("fit", "job.yaml", "task.data.seq_length=100000", folder=folder)
    assert done.returncode == 2
    assert "max_position_embeddings" in done.stderr
    assert not (folder / "runs").exists()


def test_a_wrong_option_has_the_usage_exit_code() -> None:
    done = sm_llm("fit", "tiny-local", "--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr


def test_a_run_that_is_not_there_is_reported_in_one_line(command: Command, folder: Path) -> None:
    for verb in ("status", "logs", "metrics", "plot"):
        done = command(verb, "nothing", folder=folder)
        assert done.returncode == 2
        assert done.stderr.startswith("error: no run 'nothing'")
        assert done.stderr.count("\n") == 1


def test_show_reports_where_every_value_came_from(command: Command, folder: Path) -> None:
    rows = json.loads(command("show", "job.yaml", "task.seed=3", "--json", folder=folder).stdout)
    found = {row["path"]: (row["value"], row["origin"]) for row in rows}
    assert found["task.max_steps"][0] == 4
    assert "job.yaml" in found["task.max_steps"][1]
    assert found["task.seed"][0] == 3
    assert found["task.deterministic"] == (False, "default")
    assert "task.max_steps" in command("show", "job.yaml", folder=folder).stdout


def test_init_writes_a_copy_that_means_the_same_and_never_overwrites(command: Command, folder: Path) -> None:
    done = command("init", "tiny-local", "mine.yaml", folder=folder)
    assert "sm-llm plan mine.yaml" in done.stdout
    outputs = [command("plan", name, "--json", folder=folder).stdout for name in ("mine.yaml", "tiny-local")]
    mine, recipe = map(json.loads, outputs)
    assert [plan["digest"] for plan in mine] == [plan["digest"] for plan in recipe]
    assert (folder / "mine.yaml").read_text() == command("init", "tiny-local").stdout
    again = command("init", "tiny-local", "mine.yaml", folder=folder)
    assert again.returncode == 2
    assert "mine.yaml" in again.stderr


def test_recipes_are_listed_with_what_they_do(command: Command) -> None:
    assert "tiny-local" in command("recipes").stdout
    assert all(json.loads(command("recipes", "--json").stdout).values())


def test_prepare_takes_texts_and_overrides_and_exits_with_the_state(folder: Path) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a few words of text that repeat " * 400)
    done = sm_llm(
        "prepare", "texts", "task.train_tokenizer.vocab_size=300", "--seq-length", "32", "--json", folder=folder
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["state"], status["kind"]) == ("completed", "prepare")
    assert (Path(status["result"]) / "train").is_dir()
    assert "prepared" in done.stderr
    assert json.loads(sm_llm("status", "--json", folder=folder).stdout)["run_id"] == status["run_id"]


def test_a_failed_run_exits_1_with_its_cause_and_without_our_traceback(folder: Path) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.jsonl").write_text('{"text": 1}\n')
    done = sm_llm("prepare", "texts", "--seq-length", "32", folder=folder)
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
