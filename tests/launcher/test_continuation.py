"""An unfinished run, really trained and killed, and everything that is asked of it afterwards."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from rich.console import Console as PlainConsole
from typer.testing import CliRunner

from sm_llm.cli.app import app
from sm_llm.contract.job_file import BREAK_ENVIRONMENT, JobFile
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher import api
from sm_llm.launcher.display.summary import print_summary
from sm_llm.launcher.planner import plan
from sm_llm.launcher.run import Run
from sm_llm.launcher.unfinished import UnfinishedRun
from sm_llm.runs.run_states import RunState
from tests.fixtures.typed import assert_accepted, changes_in, commands_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINES = [{"input_ids": [(row * 7 + token) % 300 for token in range(16)]} for row in range(40)]

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def spec(folder: Path, **task: Any) -> dict[str, Any]:
    return {
        "name": "broken",
        "storage": str(folder / "runs"),
        "task": {
            "kind": "train",
            "model": {"path": str(folder / "model")},
            "data": {"format": "json_rows", "train": str(folder / "rows"), "seq_length": 16},
            "micro_batch_size": 4,
            "max_steps": 40,
            "precision": {"compute": "fp32"},
            "optim": {"learning_rate": 1e-3, "warmup_steps": 4},
            "checkpoint": {"every_steps": 3},
            **task,
        },
        "compute": {"processes_per_instance": 1},
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that was killed before step 8; its newest checkpoint is of step 6."""
    from sm_llm.models.config import both_spellings
    from sm_llm.models.presets import preset

    folder = tmp_path_factory.mktemp("killed")
    (folder / "model").mkdir()
    config = both_spellings({**preset("tiny").config, **CONFIG, "tie_word_embeddings": False})
    (folder / "model/config.json").write_text(json.dumps(config))
    (folder / "rows").mkdir()
    (folder / "rows/part.json").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv(BREAK_ENVIRONMENT, "8")
        run = api.launch(spec(folder))
        ended(run)
    assert [it.step for it in run.checkpoints()] == [3, 6], "\n".join(run.logs())
    return folder


@pytest.fixture
def folder(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; places in its record are those of the copy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    copy = tmp_path / "copy"
    shutil.copytree(killed, copy, symlinks=True)
    for name in ("run.json", "job.json"):
        (file,) = copy.glob(f"runs/*/{name}")
        file.write_text(file.read_text().replace(str(killed), str(copy)))
    return copy


def run_of(folder: Path) -> Run:
    (found,) = (folder / "runs").iterdir()
    return Run(found)


def state_of(run: Run) -> tuple[bytes, bytes, list[str]]:
    """Record, job file and the names of everything below the run's folder."""
    names = sorted(str(path.relative_to(run.root)) for path in run.root.rglob("*"))
    return run.paths.record.read_bytes(), run.paths.job_file.read_bytes(), names


def edit_model(folder: Path, name: str = "model", **changes: Any) -> str:
    config = json.loads((folder / "model/config.json").read_text())
    if "rope_theta" in changes:
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": changes["rope_theta"]}
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder / name)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1},
        {"num_attention_heads": 2, "head_dim": 24},
        {"head_dim": 24},
        {"num_key_value_heads": 4},
        {"rope_theta": 5e5},
        {"tie_word_embeddings": True},
    ],
    ids=lambda it: next(iter(it)),
)
def test_F1_a_resume_with_another_model_is_refused_and_writes_nothing(folder: Path, changes: dict[str, Any]) -> None:
    run = run_of(folder)
    before = state_of(run)
    with pytest.raises(PlanError) as reported:
        run.resume(f"task.model.path={edit_model(folder, 'other', **changes)}")
    field = "rope_parameters" if "rope_theta" in changes else next(iter(changes))
    assert f"task.model.config.{field}" in str(reported.value)
    assert state_of(run) == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.data.shuffle=false", "task.data.shuffle"),
        ("task.seed=3", "task.seed"),
        ("task.global_batch_size=8", "task.global_batch_size"),
        ("task.max_steps=8000", "task.optim.schedule_steps"),
        ("task.data={format: synthetic, seq_length: 16, rows: 40}", "task.data.format"),
        ("task.start=scratch", "task.start"),
        ("task.model.config.head_dim=24", r"task\.model\.config\.head_dim"),
        ("task.model.config.initializer_range=0.5", r"initializer_range .*has no effect"),
        ("inputs.x=elsewhere", r"inputs\.x.*does not read it"),
    ],
)
def test_A3_a_refused_resume_leaves_record_digest_and_job_file(folder: Path, override: str, words: str) -> None:
    run = run_of(folder)
    before = state_of(run)
    with pytest.raises((PlanError, SpecError), match=words):
        run.resume(override)
    assert state_of(run) == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # Rows of line files are counted by the worker.
        (("task.max_steps=null", "task.max_epochs=9"), r"task\.optim\.schedule_steps"),
        (("environment.NCCL_SOCKET_IFNAME=eth9",), "eth9 leaves no network interface"),
        (("environment.SM_LLM_BREAK_BEFORE_STEPS=8,7",), "SIGKILL"),
    ],
    ids=["length", "network", "killed"],
)
def test_A3_an_attempt_that_takes_no_step_leaves_record_digest_and_job_file(
    folder: Path, changes: tuple[str, ...], reason: str
) -> None:
    run = run_of(folder)
    before, job = run.record, JobFile.read(run.paths.job_file)
    again = run.resume(*changes)
    assert again.record.changes == {2: changes}
    assert ended(again) is not RunState.COMPLETED
    after, now = again.record, JobFile.read(run.paths.job_file)
    assert re.search(reason, str(after.attempts[-1].reason))
    assert after.attempts[-1].dropped_changes == changes
    text = io.StringIO()
    print_summary(again, PlainConsole(file=text, width=500), None)
    assert f"so the run has not kept its changes: {', '.join(changes)}\n" in text.getvalue()
    assert f"step 6, with: sm-llm resume {run.uri}\n" in text.getvalue()
    for name in ("spec", "spec_digest", "origins", "plan", "changes", "before"):
        assert getattr(after, name) == getattr(before, name), name
    assert (now.spec, now.spec_digest, now.channels) == (job.spec, job.spec_digest, job.channels)


def test_A1_fewer_steps_than_the_checkpoint_has_done_are_refused_at_launch_with_a_value_that_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(folder)
    before, started = state_of(run), {"start": {"checkpoint": run.uri}}
    asked: list[tuple[int, Any]] = [
        (4, lambda: run.resume("task.max_steps=4", "task.optim.schedule_steps=4000")),
        (4, lambda: run.resume("task.max_steps=4")),
        (4, lambda: run.branch("task.max_steps=4")),
        (6, lambda: run.branch("task.max_steps=6")),
        (6, lambda: api.launch(spec(folder, max_steps=6, **started), new=True)),
        (4, lambda: api.launch(spec(folder, max_steps=4, optim={"schedule_steps": 90}, **started), new=True)),
    ]
    for steps, launch in asked:
        with pytest.raises(PlanError) as reported:
            launch()
        (fault,) = reported.value.issues
        assert fault.path == "task.max_steps"
        assert f"asks for {steps} steps in all; the checkpoint has done 6" in str(fault)
        assert "task.max_steps=12" in fault.remedy
    assert state_of(run)[:2] == before[:2]
    assert len(list((folder / "runs").iterdir())) == 1
    monkeypatch.setenv(BREAK_ENVIRONMENT, "8,7")
    ended(run.branch("task.max_steps=12"))


@pytest.mark.parametrize(
    ("verb", "change"),
    [
        ("resume", "task.max_steps=4"),
        ("resume", "task.max_steps=8000"),
        ("resume", "task.seed=3"),
        ("branch", "task.max_steps=4"),
        ("branch", "task.seed=3"),
    ],
)
def test_12e_2_every_change_and_command_that_a_refusal_prints_is_accepted(
    verb: str, change: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = run_of(folder).uri
    error = CliRunner().invoke(app, [verb, uri, change]).exception
    assert isinstance(error, PlanError)
    changes, commands = changes_in(str(error)), commands_in(str(error))
    assert changes or commands
    for proposed in changes:
        others = [change] if change.partition("=")[0] not in {it.partition("=")[0] for it in proposed} else []
        assert_accepted([verb, uri, *others, *proposed], monkeypatch)
    for command in commands:
        assert change in command
        assert_accepted(command, monkeypatch)


def test_A1_fewer_steps_than_a_checkpoint_in_s3_has_done_are_refused_at_launch(
    folder: Path, bucket: str, s3_server: Any
) -> None:
    from sm_llm.storage.syncing.sync import sync

    options, run = {"endpoint_url": s3_server.endpoint}, run_of(folder)
    uri = f"s3://{bucket}/runs/{run.id}"
    sync(str(run.root / "ckpt"), f"{uri}/ckpt", options=options)
    begins = {**spec(folder, max_steps=6, start={"checkpoint": uri}), "storage_options": options}
    with pytest.raises(PlanError, match="asks for 6 steps in all; the checkpoint has done 6"):
        api.launch(begins, new=True)


def test_A1_fewer_steps_than_are_done_fail_in_the_worker_where_only_it_can_count_them(folder: Path) -> None:
    run = run_of(folder)
    again = run.resume("task.max_steps=null", "task.max_epochs=0.3", "task.optim.schedule_steps=40")
    assert ended(again) is RunState.FAILED
    assert "asks for 3 steps in all; the checkpoint has done 6" in str(again.record.attempts[-1].reason)
    assert again.record.spec["task"]["max_steps"] == 40, "the record is as it was"


def test_A1_exactly_the_steps_that_are_done_publish_the_model_and_report_it(folder: Path) -> None:
    again = run_of(folder).resume("task.max_steps=6", "task.optim.schedule_steps=40")
    assert ended(again) is RunState.COMPLETED
    assert any("has done all steps that are asked for: nothing is trained" in line for line in again.logs())


def test_F1_rows_of_another_folder_and_rows_edited_in_place_are_refused_and_renamed_ones_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(folder)
    (folder / "other").mkdir()
    (folder / "other/part.json").write_text("".join(json.dumps(line) + "\n" for line in reversed(LINES)))
    before = state_of(run)
    with pytest.raises(PlanError, match=r"task\.data\.train \(content\)"):
        run.resume(f"task.data.train={folder / 'other'}")
    rows = folder / "rows/part.json"
    text = rows.read_text()
    rows.write_text(text.replace("[7, ", "[8, ", 1))
    with pytest.raises(PlanError, match=r"task\.data\.train \(content\)"):
        api.launch(spec(folder))
    assert state_of(run) == before
    rows.write_text(text)
    (folder / "rows").rename(folder / "moved")
    monkeypatch.setenv(BREAK_ENVIRONMENT, "8,10")
    again = run.resume(f"task.data.train={folder / 'moved'}", "task.optim.betas=[0.8, 0.9]")
    ended(again)
    from sm_llm.runs.events.events import read_events

    reported = [it["message"] for it in read_events(again.events) if it["kind"] == "notice"]
    assert "continued with changes: task.optim.betas: [0.9, 0.95] -> [0.8, 0.9] (optimiser)" in reported
    assert again.checkpoints()[-1].step == 9


def test_F1_a_branch_on_other_data_asks_for_them(folder: Path) -> None:
    run = run_of(folder)
    with pytest.raises(PlanError, match=r"task\.start\.allow_other_data=true"):
        run.branch("task.seed=3")
    with pytest.raises(PlanError, match="another model"):
        run.branch(f"task.model.path={edit_model(folder, 'other', num_hidden_layers=1)}")
    with pytest.raises(PlanError, match=r"task\.start\.allow_other_data=true"):
        api.launch(spec(folder, seed=3, start={"checkpoint": run.uri}), new=True)
    assert len(list((folder / "runs").iterdir())) == 1


def test_12e_4_a_plan_and_a_dry_run_compare_the_start_with_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = {"start": {"checkpoint": run_of(folder).uri}}
    assert plan(spec(folder, **started))
    other = spec(folder, model={"path": edit_model(folder, "other", num_hidden_layers=1)}, **started)
    with pytest.raises(PlanError, match="state of another model"):
        plan(other)
    with pytest.raises(PlanError, match="state of another model"):
        api.launch(other, dry_run=True)
    flow = {"name": "flow", "storage": str(folder / "runs"), "steps": {
        "one": {"task": spec(folder)["task"]},
        "two": {"task": {**other["task"], "start": {"checkpoint": "steps.one.output"}}},
        "three": {"task": other["task"]},
    }}  # fmt: skip
    with pytest.raises(PlanError, match=r"steps\.three\.task\.model\.config\.num_hidden_layers"):
        plan(flow)
    del flow["steps"]["three"]  # type: ignore[attr-defined]
    capsys.readouterr()
    plan(flow)
    assert "steps.two.task.start.checkpoint: steps.one.output is not there yet" in capsys.readouterr().err


def test_F2_after_a_refused_resume_the_run_is_resumed_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(folder)
    with pytest.raises(PlanError):
        run.resume("task.max_steps=8000")
    monkeypatch.setenv(BREAK_ENVIRONMENT, "8,10")
    again = api.launch(spec(folder))
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert JobFile.read(again.paths.job_file).spec.task.max_steps == 40  # type: ignore[union-attr]
    assert ended(again) is not RunState.COMPLETED
    assert again.checkpoints()[-1].step == 9


def ended(run: Run) -> RunState:
    deadline = time.monotonic() + 200
    while not (state := run.state).is_final:
        assert time.monotonic() < deadline, "\n".join(run.logs(tail=50))
        time.sleep(0.1)
    return state


@pytest.mark.parametrize(
    ("override", "continues"),
    [
        ("task.optim.learning_rate=5e-4", True),
        ("task.optim.betas=[0.8, 0.9]", True),
        ("compute.instance_count=2", True),
        ("task.seed=3", False),
        ("task.max_steps=4", False),
        ("task.max_tokens=256", False),
        ("task.model.config={rms_norm_eps: 1e-3}", False),
    ],
)
def test_F3_fit_beside_an_unfinished_run_of_another_specification_is_refused(
    folder: Path, override: str, continues: bool
) -> None:
    run = run_of(folder)
    before = state_of(run)
    others = ["task.max_steps=null"] if override.startswith("task.max_tokens") else []
    with pytest.raises(UnfinishedRun) as reported:
        api.launch(spec(folder), *others, override)
    words = str(reported.value)
    name = override.partition("=")[0].removesuffix(".config")
    for expected in (run.id, "at step 6", name, f"sm-llm resume {run.uri}", "--new"):
        assert expected in words
    assert ("Continue it with the changes" in words) is continues
    assert reported.value.run.uri == run.uri
    assert state_of(run) == before
    assert len(list((folder / "runs").iterdir())) == 1


def test_F3_what_changes_nothing_in_the_result_continues_the_run_and_is_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BREAK_ENVIRONMENT, "8,7")
    run = run_of(folder)
    free = ("task.logging.every_steps=2", "task.watchdog.stall_factor=30.0", "task.checkpoint.keep_last=5")
    again = api.launch(spec(folder), *free, "task.logging.sinks.tensorboard={}")
    assert (again.uri, again.continued_attempt) == (run.uri, 2)
    assert set(free) <= set(again.record.changes[2])
    assert again.record.spec["task"]["logging"]["every_steps"] == 2
    assert again.record.spec_digest == JobFile.read(again.paths.job_file).spec_digest
    ended(again)
    assert [it.start.step for it in again.attempts if it.start] == [0, 6]


def test_A2_the_closing_text_of_a_run_that_was_resumed_with_changes_is_true(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BREAK_ENVIRONMENT, "8,8")
    assert "same command continues it from its newest checkpoint, step 6" in summary_text(run_of(folder))
    again = run_of(folder).resume("task.optim.learning_rate=5e-4")
    ended(again)
    text = summary_text(again)
    assert "same command" not in text
    assert f"sm-llm resume {again.uri}" in text
    with pytest.raises(UnfinishedRun, match=r"learning_rate: 0\.0005 -> 0\.001 \(schedule\)"):
        api.launch(spec(folder))


def summary_text(run: Run) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        print_summary(run, console, None)
    return captured.get()


def test_A2_a_run_without_a_checkpoint_is_named_and_a_new_one_begins(
    fakes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.use("sys.exit(1)")
    first = fakes.launch()
    fakes.end(first)
    fakes.use("put(8); put(None)")
    with pytest.raises(PlanError):
        fakes.launch("task.seed=1", "task.tokenizer=/not/there")
    assert capsys.readouterr().err == "", "nothing has begun"
    second = fakes.launch("task.seed=1")
    assert fakes.end(second) is RunState.COMPLETED
    assert f"{first.id} is failed, without a checkpoint, and of another specification" in capsys.readouterr().err
    third = fakes.launch("task.seed=2")
    fakes.end(third)
    assert capsys.readouterr().err == "", "the newest one is completed"


def test_12f_every_unfinished_run_of_the_name_is_found_however_new_the_others_are(
    fakes: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.use("put(4)\nsys.exit(1)")
    older = fakes.launch()
    fakes.end(older)
    fakes.use("put(8); put(None)")
    assert fakes.end(fakes.launch("task.seed=1", new=True)) is RunState.COMPLETED
    with pytest.raises(UnfinishedRun, match=rf"{older.id} is unfinished \(failed\) at step 4"):
        fakes.launch("task.seed=2")
    fakes.use("sys.exit(1)")
    fakes.end(fakes.launch("task.seed=3", new=True))
    with pytest.raises(UnfinishedRun, match=older.id):
        fakes.launch("task.seed=2")
    capsys.readouterr()
    assert_foreseen(fakes, older, capsys)


def assert_foreseen(fakes: Any, older: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan and a dry run show what ``fit`` does beside ``older``: it continues it, or refuses."""
    from rich.console import Console

    from sm_llm.launcher.display.live import begin

    (made,) = api.plan_from_here(fakes.spec(), ())[0]
    assert f"fit would continue {older.id} (failed) as attempt 2, from this run's checkpoint of step 4" in (
        capsys.readouterr().err
    )
    assert made.settings["start"] == "this run's checkpoint of step 4"
    (sent,) = api.launch(fakes.spec(), dry_run=True)
    assert (sent.job.run_id, sent.job.attempt, sent.job.run_uri) == (older.id, 2, older.uri)
    capsys.readouterr()
    (other,) = api.launch(fakes.spec(), "task.seed=2", dry_run=True)
    assert other.job.run_id != older.id
    reported = capsys.readouterr().err
    assert f"fit would start nothing beside an unfinished run. {older.id} is unfinished (failed) at step 4" in reported
    assert "--new" in reported
    assert len(older.attempts) == 1, "nothing was started"
    fakes.use("put(8); put(None)")
    again = fakes.launch()
    console = Console(width=200)
    with console.capture() as captured:
        begin(again, console)
    assert "start      this run's checkpoint of step 4" in captured.get()
    assert "random weights" not in captured.get()
    fakes.end(again)


def test_12f_finish_suggests_only_what_is_accepted(fakes: Any) -> None:
    from sm_llm.errors import LaunchRefused

    fakes.use("sys.exit(1)")
    run = fakes.launch()
    fakes.end(run)
    with pytest.raises(LaunchRefused, match=rf"nothing saved\. Begin anew with: sm-llm rerun {run.uri}"):
        run.finish()


def test_A2_in_a_terminal_fit_asks(folder: Path) -> None:
    """Only somebody at a terminal is asked; here nobody answers but with q."""
    (folder / "job.yaml").write_text(yaml.safe_dump(spec(folder)))
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "sm_llm.cli", "fit", str(folder / "job.yaml"), "task.optim.eps=1e-6"]
    fit = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    reported = b""
    while b"[q]uit" not in reported:
        reported += os.read(leader, 4096)
    os.write(leader, b"q\n")
    with contextlib.suppress(OSError):  # the other end is closed
        while more := os.read(leader, 4096):
            reported += more
    assert fit.wait(60) == 1
    os.close(leader)
    assert b"is unfinished" in reported
    assert len(list((folder / "runs").iterdir())) == 1
    piped = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    assert piped.returncode == 2
    assert "task.optim.eps: 1.0e-08 -> 1.0e-06 (optimiser)" in piped.stderr
    assert "[q]uit" not in piped.stderr
