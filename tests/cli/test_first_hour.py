"""What a person meets in the first hour: versions, help, widths, pipes, wrong places, words about what happens."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import sm_llm
from sm_llm import cli
from sm_llm.cli.app import app
from sm_llm.cli.options import console
from sm_llm.errors import PlanError, StorageError
from sm_llm.launcher import api
from sm_llm.launcher.display.live import live_text
from sm_llm.launcher.display.tables import metrics_table, origins_table, runs_table, status_table
from sm_llm.launcher.observe.listed import Listed
from sm_llm.runs.events.run_metrics import Summary, SummaryBuilder
from sm_llm.runs.run_states import EXIT_CODES, USAGE_EXIT_CODE, RunState
from sm_llm.spec.loading.load import load, recipe_files, recipe_summary


def cli_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``sm-llm`` in this process."""
    monkeypatch.setattr(sys, "argv", ["sm-llm", *argv])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    out, err = capsys.readouterr()
    return int(leaving.value.code or 0), out, err


@pytest.mark.parametrize("columns", [30, 60, 200])
def test_E21_recipes_keep_their_names_whole_at_any_width(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, shown, _ = cli_output(monkeypatch, capsys, "recipes")
    assert code == 0
    lines = shown.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == set(recipe_files())
    whole = " ".join(shown.split())
    assert all(f"{name} {' '.join(recipe_summary(file).split())}" in whole for name, file in recipe_files().items())


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_output(monkeypatch, capsys, "--version") == (0, f"sm-llm {sm_llm.__version__}\n", "")


def test_help_and_docs_list_every_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text, _ = cli_output(monkeypatch, capsys, "--help")
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for code in (*EXIT_CODES.values(), USAGE_EXIT_CODE):
        assert f" {code} " in text
        assert f"| {code} |" in page
    assert "--install-completion" in text


def test_a_file_that_is_there_is_not_overwritten_by_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my job.yaml"
    assert cli_output(monkeypatch, capsys, "init", "smoke", str(file))[0] == 0
    file.write_text("mine")
    code, _, reported = cli_output(monkeypatch, capsys, "init", "smoke", str(file))
    assert (code, file.read_text()) == (2, "mine")
    assert (
        f"is there already, and may hold your changes. Give another name, or remove it first: rm '{file}'" in reported
    )


@pytest.mark.parametrize(
    ("option", "override"),
    [
        ((), "task.seq_length=9"),
        (("--tokenizer", "t"), "task.tokenizer=u"),
        (("--validation-fraction", "0.1"), "task.validation_fraction=0.2"),
        (("--name", "a"), "name=b"),
    ],
)
def test_an_option_of_prepare_and_the_same_override_are_refused(
    option: tuple[str, ...], override: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, reported = cli_output(monkeypatch, capsys, "prepare", "texts", "--seq-length", "8", *option, override)
    assert code == 2
    assert f"{override.partition('=')[0]} is given as an option as well" in reported


def test_only_public_names_are_shown() -> None:
    assert dir(sm_llm) == sorted([*sm_llm.__all__, "__version__"])


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_list_of_runs_keeps_ids_whole(width: int) -> None:
    run_id = "llama-3-1-8b-fsdp-20261129-012748-c750"
    run = Listed(run_id, f"/runs/{run_id}", "train", RunState.COMPLETED, created=0.0, step=9, total_steps=9, loss=4.25)
    shown = Console(width=width, file=io.StringIO())
    shown.print(runs_table([run], width))
    (line,) = [it for it in shown.file.getvalue().splitlines() if run_id in it]  # type: ignore[attr-defined]
    assert "completed" in line, "in one line, with what matters most"
    heading, _, _, *below = shown.file.getvalue().strip().splitlines()  # type: ignore[attr-defined]
    assert ("4.2500" in line) is ("loss" in heading) is (width > 60)
    assert any("too narrow for" in it for it in below) is (width < 120), "what is not shown"


def printed(table: Any, width: int) -> list[str]:
    shown = Console(width=width, file=io.StringIO())
    shown.print(table)
    lines: list[str] = shown.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_E21_numbers_of_metrics_stay_whole_in_any_terminal(width: int) -> None:
    row = {"step": 1234, "loss": 6.2652, "validation_loss": 6.2568, "learning_rate": 9.046e-06, "grad_norm": 1.1990,
           "tokens_per_second": 123456.0, "mfu": 0.412}  # fmt: skip
    text = "\n".join(printed(metrics_table([row], width), width))
    assert "1234   6.2652" in text
    assert "…" not in text
    assert ("9.046e-06" in text) is ("learning rate" in text.partition("─")[0])
    assert ("too narrow for:" in text) is (width < 100)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_E21_keys_of_a_specification_stay_whole_in_any_terminal(width: int) -> None:
    rows = [
        ("task.checkpoint.max_unpublished_seconds", 7200.0, "default"),
        ("task.model.path", "z" * 50, "recipe a:2"),
    ]
    lines = printed(origins_table(rows, width), width)
    assert any(" task.checkpoint.max_unpublished_seconds " in it for it in lines)
    assert any("recipe a:2" in it for it in lines) is (width > 60)
    assert sum(it.count("z") for it in lines[3:]) == 50, "values go on below"


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_E21_the_live_line_is_one_line_in_any_terminal(width: int) -> None:
    summary = Summary(120, 36000, 6.2565, 6.2572, 12345.0, 3725.0)
    line = live_text("tiny-local-train", summary, width).plain
    assert len(line) <= width
    assert ("val 6.2572" in line, "12,345 tok/s" in line) == (width >= 120, width >= 80)
    assert ("step 120/36000" in line) is (width > 30)
    preparing = Summary(phase="tokenising", done=3.0, total=9.0, unit="MB")
    assert len(live_text("tiny-local-prepare", preparing, width).plain) <= width


def test_columns_is_honoured_where_output_is_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "61")
    assert console().width == 61
    monkeypatch.delenv("COLUMNS")
    assert console().width == 200


def test_a_closed_pipe_is_not_a_traceback() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-m", "sm_llm.cli", "show", "tiny-local", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_the_time_left_is_smoothed() -> None:
    builder = SummaryBuilder()
    builder.add({"kind": "attempt_started", "total_steps": 100})
    builder.add({"kind": "step", "step": 50, "loss": 1.0})
    found = []
    for seconds in (30.0, 1.0, 1.0, 3.0, 1.0):
        builder.add({"kind": "throughput", "tokens_per_second": 1.0, "step_seconds": seconds})
        found.append(builder.summary.eta_seconds)
    assert found[0] == 1500.0
    assert found[1:3] == [50.0, 50.0], "the window with compilation does not linger"
    assert found[3] == pytest.approx(80.0)
    assert found[4] == pytest.approx(71.0), "one slow window neither triples the time left nor is forgotten at once"


def test_a_run_that_was_asked_to_stop_reports_it() -> None:
    builder = SummaryBuilder()
    events: list[dict[str, Any]] = [
        {"kind": "attempt_started", "total_steps": 9},
        {"kind": "stop_requested", "now": False},
    ]
    for event in events:
        builder.add(event)
    assert builder.summary.stopping
    builder.add(events[0])
    assert not builder.summary.stopping, "another attempt"


@pytest.mark.parametrize("shell", ["ZMQInteractiveShell", "TerminalInteractiveShell", None])
def test_a_launch_that_waits_prints_in_notebooks(shell: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("IPython", (), {"get_ipython": staticmethod(lambda: type(shell, (), {})() if shell else None)})
    monkeypatch.setitem(sys.modules, "IPython", module)  # type: ignore[arg-type]
    assert api._in_notebook() is (shell == "ZMQInteractiveShell")


def faults(source: Any, *overrides: str) -> str:
    with pytest.raises(PlanError) as raised:
        sm_llm.plan(source, *overrides)
    return str(raised.value)


def test_wrong_places_are_reported_by_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    assert "storage (override): must be a folder, and is a file (got 'file')" in faults("smoke", "storage=file")
    assert f"lies below {tmp_path / 'file'}, which is a file" in faults("smoke", "storage=file/runs")
    Path("gone").symlink_to("nowhere")
    assert "is a link to a place that is not there" in faults("smoke", "storage=gone")
    assert "more than 255 bytes" in faults("smoke", f"storage={'x' * 256}")
    tensorboard = "task.logging.sinks.tensorboard.folder"
    assert f"{tensorboard} (override): must be a folder, and is a file" in faults("smoke", f"{tensorboard}=file")
    script = {"name": "s", "task": {"kind": "script", "source": ".", "entry": "-m nothing.here"}}
    assert "task.entry (Python): is not in" in faults(script)
    Path("own").mkdir()
    own = {**script, "task": {**script["task"], "entry": "-m own.here"}}  # type: ignore[dict-item]
    assert "task.entry" in faults(own)
    Path("own/here.py").touch()
    assert sm_llm.plan(own)
    assert sm_llm.plan({**script, "task": {**script["task"], "entry": "-m json.tool"}})  # type: ignore[dict-item]


@pytest.mark.skipif(not Path("/proc/self/mounts").exists(), reason="only Linux lists its file systems there")
@pytest.mark.parametrize("verb", [["plan"], ["fit"], ["fit", "--dry-run"]])
def test_12f_a_storage_that_cannot_be_made_is_one_error_of_every_verb(verb: list[str]) -> None:
    found = CliRunner().invoke(app, [*verb, "smoke", "storage=/proc/x"])
    assert isinstance(found.exception, PlanError)
    (reported,) = found.exception.issues
    assert str(reported).startswith(
        "storage (command line): must be a folder, and lies below /proc, which is part of a file system of the kernel"
    )


def test_12f_a_folder_of_a_run_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    from sm_llm.runs.run_store import run_store_at

    (tmp_path / "file").touch()
    record = SimpleNamespace(spec={})
    with pytest.raises(StorageError, match="the run's folder cannot be made: "):
        run_store_at(tmp_path / "file/runs/one").create(record)  # type: ignore[arg-type]


def test_12f_an_error_of_the_file_system_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/disk/run.json")

    monkeypatch.setattr(api, "launch", full)
    code, _, err = cli_output(monkeypatch, capsys, "fit", "smoke")
    assert (code, err) == (1, "error: /disk/run.json: No space left on device\n")


def test_a_tokenizer_of_the_hub_needs_no_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()

    def tokenizer(name: str) -> Any:
        return load("smoke", [f"task.tokenizer={name}"]).spec.task.tokenizer  # type: ignore[union-attr]

    assert tokenizer("org/name") == "hf://org/name"
    assert tokenizer("here/name") == "here/name", "a folder here that holds no such tokenizer"
    assert tokenizer("/org/name") == "/org/name"
    steps = load("tiny-local", ["steps.train.task.tokenizer=org/name"]).spec
    assert steps.steps["train"].task.tokenizer == "hf://org/name"  # type: ignore[union-attr]


@pytest.mark.parametrize("reached", [True, False])
def test_a_storage_that_cannot_be_reached_is_reported_once(reached: bool, s3_server: Any, monkeypatch: Any) -> None:
    from sm_llm.storage.s3.s3_options import S3Options
    from sm_llm.storage.storage_probe import probe_storage

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test") if reached else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    report = probe_storage("s3://no-such-bucket-here/runs", S3Options(endpoint_url=s3_server.endpoint))
    assert not report.ok
    assert len(report.checks) == 1
    assert ("does not exist" if reached else "AWS_ACCESS_KEY_ID") in report.text()


def test_status_shows_that_a_run_stops(tmp_path: Path) -> None:
    from sm_llm.launcher.observe.status import Status
    from sm_llm.runs.events.run_metrics import Summary

    status = Status(
        "r", str(tmp_path), "train", RunState.RUNNING, None, 1, "1", "local://x/1", 0.0, None,
        Summary(stopping=True), None, {}, None,
    )  # fmt: skip
    shown = Console(width=100, file=io.StringIO())
    shown.print(status_table(status))
    shown.print(status_table(replace(status, state=RunState.STOPPED)))
    assert shown.file.getvalue().count("(stopping)") == 1  # type: ignore[attr-defined]
