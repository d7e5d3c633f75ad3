"""Failures of one process of two nodes: everybody ends soon, and every node names the first and its cause."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from nodes import Nodes

from sm_llm.contract.failure import Cause

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
RAISE = """
import os
from sm_llm.worker.tasks import train
take = train.Trainer.take_step
def broken(self, step, batches, take=take):
    if step == 6 and os.environ["RANK"] == "{rank}":
        {what}
    return take(self, step, batches)
train.Trainer.take_step = broken
"""


def breaking(rank: int, what: str) -> str:
    """Code that makes ``rank`` do ``what`` instead of step 6."""
    return RAISE.format(rank=rank, what=what)


@pytest.mark.parametrize("rank", [1, 0])
def test_OB09_an_error_on_one_rank_ends_both_nodes_and_both_name_it(
    tmp_path: Path, forks: dict[str, str], rank: int
) -> None:
    """The other rank waits for it in a collective."""
    with Nodes(tmp_path / "run", environ=forks, before=breaking(rank, "raise ValueError('upside down')")) as job:
        job.until(lambda: any(process.poll() is not None for process in job.torchruns))
        job.ended()
        failures = job.failures()
    assert [it.headline for it in failures] == [f"rank {rank}: ValueError: upside down"] * 2, job.log()
    assert all(process.returncode == 1 for process in job.torchruns)
    (event,) = job.events("failed")
    assert (event["rank"], event["node"], event["step"]) == (rank, rank, 5)
    assert "raise ValueError('upside down')" in event["traceback"]
    assert "raise ValueError" in job.container(0).failure.read_text(), "every node shows the first rank's traceback"
    assert job.stops() == [None, None]


def test_a_rank_that_waits_for_ever_outside_collectives_is_ended_too(tmp_path: Path, forks: dict[str, str]) -> None:
    """As a rank does that waits for its device in a driver: nothing raises there."""
    task = breaking(1, "raise ValueError('upside down')") + breaking(0, "import time; time.sleep(3600)")
    with Nodes(tmp_path / "run", environ=forks, before=task) as job:
        job.until(lambda: job.events("failed"))
        job.ended()
        failures = job.failures()
    assert [it.rank for it in failures] == [1, 1], job.log()


def test_a_killed_rank_leaves_word_of_its_absence_only(tmp_path: Path, forks: dict[str, str]) -> None:
    """Nobody but its torchrun knows that signal 9 did it; the launcher reads that in the node's log."""
    with Nodes(tmp_path / "run", environ=forks) as job:
        job.until_step(5)
        os.kill(job.workers(1)[0], signal.SIGKILL)
        job.ended()
        failure = job.container(0).failure.read_text()
    assert failure.startswith(f"rank 0: {Cause.LOST_PEER.value}"), job.log()
    assert "exitcode  : -9" in job.log()


def test_a_script_that_wrote_its_own_reason_keeps_it(tmp_path: Path, forks: dict[str, str]) -> None:
    own = (
        "import os, pathlib\npathlib.Path(os.environ['SAGEMAKER_BASE_DIR'], 'output').mkdir(exist_ok=True)\n"
        "pathlib.Path(os.environ['SAGEMAKER_BASE_DIR'], 'output', 'failure').write_text('my own reason')\n"
    )
    with Nodes(tmp_path / "run", nodes=1, environ=forks, before=own + breaking(0, "raise ValueError('x')")) as job:
        job.ended()
        assert job.container(0).failure.read_text() == "my own reason", job.log()


def test_orphans_of_a_killed_torchrun_do_not_live_on(tmp_path: Path) -> None:
    """Not forked: only here is the worker a child of torchrun."""
    with Nodes(tmp_path / "run", nodes=1) as job:
        job.until_step(5)
        (worker,) = job.workers()
        job.torchruns[0].kill()
        job.torchruns[0].wait()
        job.until(lambda: not os.path.exists(f"/proc/{worker}"))
