"""Real training jobs of two nodes that are killed, broken or stopped: what the run handle reports of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import RunFailed, SubmitError
from sm_llm.launcher import api
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.launcher.run import Run

pytestmark = [pytest.mark.timeout(480), pytest.mark.integration]
SPEC: dict[str, Any] = {
    "name": "trouble",
    "compute": {"instance_count": 2},
    "environment": {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    "task": {
        "kind": "train",
        "model": {
            "preset": "tiny",
            "config": {
                "vocab_size": 300,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
        "data": {"format": "synthetic", "seq_length": 16, "rows": 64, "validation_rows": 8},
        "max_steps": 5000,
        "checkpoint": {"every_steps": 20},
        "logging": {"every_steps": 5},
    },
}


def until(true: Callable[[], object], seconds: float = 400.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def kinds(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.paths.events) if event["kind"] == kind]


def workers(run: Run) -> list[int]:
    """The worker processes of a run, by node."""
    scripts = [str(run.paths.node_dir(1, node) / "code" / "train.py").encode() for node in range(2)]
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"torch.distributed.run" not in command:
            found.update({node: int(path.parent.name) for node, script in enumerate(scripts) if script in command})
    return [found[node] for node in sorted(found)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    run = api.launch({**SPEC, "storage": str(tmp_path / "runs")})
    try:
        until(lambda: kinds(run, "checkpoint_published"))
        yield run
    finally:  # or it would train on beside all later tests
        with suppress(SubmitError):
            run.stop(now=True, wait=True)


def test_OB09_wait_names_the_rank_that_was_killed_and_by_what(run: Run) -> None:
    os.kill(workers(run)[1], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"rank 1: killed by signal 9 \(SIGKILL\)"):
        run.wait()
    assert run.state is RunState.FAILED
    assert run.attempts[-1].rank == 1
    assert not workers(run)


def test_CK18_stop_saves_the_last_step_and_reports_it(run: Run) -> None:
    run.stop()
    until(lambda: run.state.is_final)
    assert run.state is RunState.INTERRUPTED
    (stopped,) = kinds(run, "stopped")
    assert stopped["step"] == stopped["checkpoint"]
    assert f"the checkpoint of step {stopped['step']} is safe" in str(run.status().reason)
    assert not workers(run)


def test_CK18_one_workers_signal_stops_the_whole_run_resumably(run: Run) -> None:
    os.kill(workers(run)[1], signal.SIGTERM)
    until(lambda: run.state.is_final)
    assert run.state is RunState.INTERRUPTED
    assert "SIGTERM to rank 1" in str(run.status().reason)
