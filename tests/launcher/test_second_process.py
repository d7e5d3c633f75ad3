"""A run inspected and controlled from other processes while it runs: shells, notebooks, after a kernel restart."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.local import backend as local
from sm_llm.launcher.find_runs import attach
from sm_llm.runs.run_lock import is_anyone_alive
from sm_llm.runs.run_states import EXIT_CODES, RunState

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.preloaded import Preloaded

pytestmark = pytest.mark.integration

Fakes = Any
TRAINS = """
from sm_llm.runs.events.events import *
log = EventWriter(paths.event_file(job.attempt, "rank0"), job.attempt)
log.write(AttemptStarted(1, "cpu", 8000, {}))
put(1)
for step in range(1, 8000):
    log.write(Step(step, 4.0 / step, 1.0, 1e-3, 64))
    log.write(Throughput(step, 640.0, 640.0, None, 0.1, 0.0, None, 1))
    print(f"step {step} | Loss: {4.0 / step}", flush=True)
    time.sleep(0.1)
"""
"""A fake worker that trains for minutes unless it is stopped, and has saved step 1."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}


def shell(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``sm-llm`` in a shell of its own."""
    argv = [sys.executable, "-m", "sm_llm.cli", *arguments]
    return subprocess.run(
        argv, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250, check=False
    )  # fmt: skip


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "sm_llm.cli", *arguments]
    return subprocess.Popen(
        argv, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip


READING = {
    "status": [], "attempts": [], "checkpoints": [], "metrics": ["--last", "2"], "plot": [], "ls": [],
    "logs": ["--tail", "1"],
}  # fmt: skip


def test_every_reading_verb_and_stop_work_from_other_shells_while_a_run_continues(fakes: Fakes, tmp_path: Path) -> None:
    fakes.use(TRAINS)
    run = fakes.launch()
    fakes.wait_until(lambda: run.status().progress.step >= 3)
    following, watching = started(tmp_path, "logs", "-f", "--tail", "0"), started(tmp_path, "attach", run.id)
    reported: dict[str, Any] = {}
    for verb, options in READING.items():
        done = shell(tmp_path, verb, *options, "--json")
        assert done.returncode == 0, done.stderr
        reported[verb] = json.loads(done.stdout)
    assert (reported["status"]["state"], reported["status"]["ended"]) == ("running", None)
    assert reported["status"]["cost"] is None
    assert [row["state"] for row in reported["ls"]] == ["running"]
    assert [it["number"] for it in reported["attempts"]] == [1]
    assert [(it["step"], it["valid"]) for it in reported["checkpoints"]] == [(1, True)]
    assert reported["metrics"][-1]["loss"] == 4.0 / reported["metrics"][-1]["step"]
    assert "Loss:" in reported["logs"]["line"]
    assert run.paths.plot.is_file()

    stop = shell(tmp_path, "stop", run.native_uri)
    assert stop.returncode == 0, stop.stderr
    assert "was asked to stop after its current step" in stop.stdout
    assert "interrupted-resumable" in stop.stdout
    assert f"sm-llm resume {run.uri}" in stop.stdout
    assert run.state is RunState.INTERRUPTED

    lines, _ = following.communicate(timeout=150)
    assert following.returncode == 0
    assert lines.count("Loss:") > 3
    assert "step 1 |" not in lines, "OB07: what was printed before is not told again"
    watched, _ = watching.communicate(timeout=150)
    assert watching.returncode == EXIT_CODES[RunState.INTERRUPTED]
    assert "is running, attempt 1" in watched
    assert "step 1/8000" not in watched
    assert "interrupted-resumable in" in watched


def test_tables_for_people_have_the_same_facts(fakes: Fakes, tmp_path: Path) -> None:
    fakes.use(TRAINS)
    run = fakes.launch()
    fakes.wait_until(lambda: run.status().progress.step >= 2)
    words = {verb: shell(tmp_path, verb).stdout for verb in ("ls", "status", "attempts", "checkpoints")}
    run.stop(wait=True)
    assert run.id in words["ls"]
    assert "still running" in words["ls"]
    assert "running since" in words["status"]
    assert str(run.native_uri) in words["status"]
    assert "still running" in words["attempts"]
    assert "yes" in words["checkpoints"]
    ended = shell(tmp_path, "attempts").stdout
    assert "interrupted-resumable" in ended


def test_wait_ends_with_the_exit_code_of_the_state_and_reports_the_cause(fakes: Fakes, tmp_path: Path) -> None:
    fakes.use("print('before'); raise ValueError('rows are upside down')")
    run = fakes.launch()
    done = shell(tmp_path, "wait", "--json")
    assert done.returncode == EXIT_CODES[RunState.FAILED]
    assert "ValueError: rows are upside down" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["state"] == "failed"
    refused = shell(tmp_path, "resume", run.uri)
    assert refused.returncode == 2, "nothing was started"
    assert "no usable checkpoint" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert shell(tmp_path, "finish").returncode == 2


# --- LM04


def test_LM04_under_torchrun_the_scripts_own_error_comes_first(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: Preloaded
) -> None:
    script = (
        "import os, pathlib, time\n"
        "rank, run = os.environ['RANK'], pathlib.Path(os.environ['SM_LLM_RUN_FOLDER'])\n"
        "log = run / 'logs' / 'attempt-1' / 'node-0.log'\n"
        "print('up', rank, flush=True)\n"
        "time.sleep(300 * (rank == '0'))\n"  # torchrun ends it
        "while log.read_text().count(' up ') < 2: time.sleep(0.01)\n"
        "raise ValueError(f\"rank {os.environ['RANK']} has rows that are upside down\")\n"
    )
    monkeypatch.setattr(local, "entrypoint_source", lambda kind: script)
    run = fakes.launch("compute.processes_per_instance=2")
    done = shell(tmp_path, "wait", run.id)
    assert done.returncode == EXIT_CODES[RunState.FAILED]
    assert "ValueError: rank 1 has rows that are upside down" in done.stderr
    assert "ChildFailedError" not in done.stderr
    assert "exit code" not in done.stderr
    lines = list(run.logs(rank=1))
    assert lines[0] == "up 1"
    assert lines[-1] == "ValueError: rank 1 has rows that are upside down"
    assert "Traceback (most recent call last):" in lines
    assert list(run.logs(rank=0, pattern="^up")) == ["up 0"]


# --- notebooks

LAUNCH = """
import sys
from sm_llm.launcher import api
from sm_llm.launcher.backends.local import backend as local
from sm_llm.launcher.backends.local.container import PORT, entry_script
local._torchrun = lambda job, node, rendezvous, base: (sys.executable, str(entry_script(base, "train")), "0", "", PORT)
local.entrypoint_source = lambda kind: {source!r}
run = api.launch({spec!r})
print(run.uri)
"""


def execute(client: Any, code: str) -> str:
    """What a cell prints; fails with the cell's error."""
    request = client.execute(code)
    text, deadline = "", time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=5)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        assert message["msg_type"] != "error", "\n".join(content["traceback"])
        text += content.get("text", "") if message["msg_type"] == "stream" else ""
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return text
    raise AssertionError("the cell did not end")


def test_a_run_outlives_its_notebook_kernel_and_is_attached_again(fakes: Fakes, tmp_path: Path) -> None:
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path), env=environment())
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=90)
        uri = execute(client, LAUNCH.format(source=fakes.worker(TRAINS), spec=fakes.spec())).strip()
        manager.restart_kernel(now=True)
        client.wait_for_ready(timeout=90)
        assert is_anyone_alive(attach(uri).root)
        program = f"import sm_llm\nrun = sm_llm.attach({uri!r})\nprint(run.state.value)"
        assert execute(client, program).strip() == "running"
        assert execute(client, "print(run.stop(wait=True).value)").strip() == "interrupted-resumable"
        assert int(execute(client, "print(len(run.metrics()))")) > 0
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert attach(uri).state is RunState.INTERRUPTED
