"""Whole local runs with the real worker under the real torchrun, on models of about 30 thousand parameters."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from sm_llm.launcher.find_runs import attach
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.preloaded import Preloaded

Fakes = Any


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fakes: Fakes, preloaded: Preloaded) -> Fakes:
    """``fakes`` whose worker is the real one (``use`` was not called)."""
    monkeypatch.chdir(tmp_path)
    return fakes


def end(run: Run, seconds: float = 200.0) -> RunState:
    deadline = time.monotonic() + seconds
    while not (state := run.state).is_final:
        assert time.monotonic() < deadline, "\n".join(run.logs(tail=50))
        time.sleep(0.05)
    return state


def test_two_nodes_train_publish_and_can_be_read(runs: Fakes) -> None:
    run = runs.launch("compute.instance_count=2", "task.validation.every_steps=4", "task.logging.every_steps=2")
    assert end(run) is RunState.COMPLETED, "\n".join(run.logs())
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["validation_loss"] > 0
    assert (run.result / "config.json").is_file()
    assert (run.result_link / "model.safetensors").is_file() or list(run.result_link.glob("*.safetensors"))
    assert run.plot().is_file()
    status = run.status()
    assert (status.progress.step, status.progress.total_steps, status.attempt) == (8, 8, 1)
    assert any("Loss:" in line for line in run.logs())
    hosts = [json.loads(path.read_text())["current_host"] for path in sorted(run.root.rglob("resourceconfig.json"))]
    assert hosts == ["algo-1", "algo-2"]
    assert not list(run.root.rglob("scratch"))


def exact(run: Run) -> list[tuple[int, str, str]]:
    return [(row["step"], row["loss"].hex(), row["learning_rate"].hex()) for row in run.metrics()]


LONGER = ("task.max_steps=60", "task.checkpoint.every_steps=5", "task.logging.every_steps=1", "task.seed=4")


def kill_everything(run: Run) -> None:
    supervisor = psutil.Process(int(run.attempts[-1].native_id))
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_CK23_killed_at_a_random_step_the_same_launch_continues_bit_for_bit(runs: Fakes, preloaded: Preloaded) -> None:
    unbroken = runs.launch(*LONGER, "compute.processes_per_instance=2", new=True)
    assert end(unbroken) is RunState.COMPLETED
    preloaded.off()  # whole process trees are killed
    broken = runs.launch(*LONGER, "compute.processes_per_instance=2", new=True)
    step = random.randint(6, 34)
    runs.wait_until(lambda: broken.status().progress.step >= step, seconds=100)
    kill_everything(broken)
    runs.wait_until(lambda: broken.state is RunState.INTERRUPTED)
    again = runs.launch(*LONGER, "compute.processes_per_instance=2")
    assert (again.uri, again.continued_attempt) == (broken.uri, 2)
    assert end(again) is RunState.COMPLETED, "\n".join(again.logs())
    assert exact(again) == exact(unbroken), f"killed at step {step}"


@pytest.mark.integration
def test_DL18_two_runs_at_once_do_not_collide(runs: Fakes) -> None:
    both = [runs.launch("compute.instance_count=2", new=True) for _ in range(2)]
    assert [end(run) for run in both] == [RunState.COMPLETED] * 2
    assert exact(both[0]) == exact(both[1])


FLOW = """
name: flow
steps:
  prepare:
    task:
      kind: prepare
      sources: [texts]
      seq_length: 16
      validation_fraction: 0.2
      train_tokenizer: {vocab_size: 300}
  train:
    task:
      kind: train
      model:
        preset: tiny
        config: {vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
                 num_key_value_heads: 2}
      tokenizer: steps.prepare.output/tokenizer
      data:
        format: rows
        train: steps.prepare.output/train
        validation: steps.prepare.output/validation
        seq_length: 16
      micro_batch_size: 2
      max_steps: 12
      logging: {every_steps: 2, sample_prompt: "a few"}
"""


def write_flow(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"a few words of text number {number} that repeat. " * 20)
    (folder / "flow.yaml").write_text(FLOW)


def in_terminal(arguments: list[str], folder: Path) -> tuple[int, str]:
    """Run ``sm-llm`` in a pseudo-terminal; exit code and everything it wrote."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sm_llm.cli", *arguments], cwd=folder, stdin=terminal, stdout=terminal, stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
    )  # fmt: skip
    os.close(terminal)
    written = b""
    try:
        while chunk := os.read(controller, 65536):
            written += chunk
    except OSError:  # the terminal is gone when its last process is
        pass
    os.close(controller)
    return process.wait(), written.decode()


@pytest.mark.integration
def test_fit_of_a_workflow_in_a_terminal_ends_with_all_a_person_needs(runs: Fakes, tmp_path: Path) -> None:
    write_flow(tmp_path)
    code, text = in_terminal(["fit", "flow.yaml"], tmp_path)
    assert code == 0, text
    assert re.search(r"step \d+/12  loss \d\.\d+", text), "the live line"
    run = attach(storage=tmp_path / "runs")
    for words in ("prepared", "validation loss", "completed", "A sample of what it writes", "a few", "Load it with",
                  "AutoModelForCausalLM", "plot.png", f"{run.root.name}/result"):  # fmt: skip
        assert words in text
    assert run.kind == "workflow"
    assert run.plot().is_file()
    assert (run.result / "tokenizer.json").is_file()
    piped = subprocess.run(
        [sys.executable, "-m", "sm_llm.cli", "fit", "flow.yaml", "--json"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(piped.stdout)["state"] == "completed"
    assert "\x1b" not in piped.stderr
    assert "step 12/12  loss" in piped.stderr
