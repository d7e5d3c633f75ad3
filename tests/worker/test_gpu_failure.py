"""Two nodes with one GPU each: a process that waits in NCCL notices nothing by itself, and must end all the same."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from nodes import Nodes
from test_failure import breaking

from sm_llm.contract.failure import Cause
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.mark.parametrize("rank", [1, 0])
def test_an_error_on_one_rank_ends_both_nodes(tmp_path: Path, rank: int) -> None:
    with Nodes(tmp_path / "run", gpus=True, before=breaking(rank, "raise ValueError('upside down')")) as job:
        job.until(lambda: job.events("failed"))
        job.ended()
        failures = job.failures()
    assert [it.headline for it in failures] == [f"rank {rank}: ValueError: upside down"] * 2, job.log()


def test_an_error_while_the_other_rank_waits_for_its_device(tmp_path: Path) -> None:
    """Rank 0 is made to synchronise: it hangs in the driver until the watchdog ends it."""
    wait = breaking(0, "import torch; take(self, step, batches); torch.cuda.synchronize()")
    late = breaking(1, "import time; time.sleep(3); raise ValueError('upside down')")
    with Nodes(tmp_path / "run", gpus=True, before=wait + late) as job:
        job.until(lambda: job.events("failed"))
        job.ended()
        failures = job.failures()
    assert [it.rank for it in failures] == [1, 1], job.log()


def test_memory_that_runs_out_on_the_device_is_named(tmp_path: Path) -> None:
    greedy = breaking(1, "import torch; torch.empty(10**13, device='cuda')")
    with Nodes(tmp_path / "run", gpus=True, before=greedy) as job:
        job.until(lambda: job.events("failed"))
        job.ended()
        failures = job.failures()
    assert {(it.rank, it.cause) for it in failures} == {(1, Cause.DEVICE_MEMORY)}, job.log()


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    with Nodes(tmp_path / "run", gpus=True, watchdog={"stall_seconds": 4.0, "stall_factor": 2.0}) as job:
        job.until_step(10)
        os.kill(job.workers(1)[0], signal.SIGSTOP)
        job.until(lambda: job.torchruns[0].poll() is not None)
        (stalled,) = job.events("stalled")
        assert stalled["silent"] == [1], job.log()
        assert "is stopped (SIGSTOP)" in job.container(0).failure.read_text()


def test_CK18_a_signal_to_one_process_stops_both_nodes_at_the_same_step(tmp_path: Path) -> None:
    with Nodes(tmp_path / "run", gpus=True, max_steps=100_000) as job:
        job.until_step(10)
        os.kill(job.workers(1)[0], signal.SIGTERM)
        job.ended()
        first, second = job.stops()
    assert first is not None, job.log()
    assert first == second
    assert first.checkpoint == first.step
    assert first.state is RunState.INTERRUPTED
