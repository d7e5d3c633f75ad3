"""A job of two processes that is killed with SIGKILL again and again: one process or all, in steps and in saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from nodes import Nodes
from worker_jobs import events, exact_steps

from sm_llm.storage.publish import find_final, list_checkpoints
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 60
TASK = {"max_steps": STEPS, "checkpoint": {"every_steps": 5, "verify_state": True}, "logging": {"every_steps": 1}}
ARM = """
import functools, os, signal
from importlib import import_module

def arm(place, nth, ranks, moment):
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, import_module(module))
    original, calls = getattr(owner, name), [0]

    @functools.wraps(original)
    def killing(*arguments, **named):
        calls[0] += 1
        if moment == "before" and calls[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **named)
        if moment == "after" and calls[0] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    if ranks == "all" or int(os.environ["RANK"]) == ranks:
        setattr(owner, name, killing)

"""
STEP = "sm_llm.worker.train:Training.take_step"
KILLS = [
    (STEP, 9, "all", "before"),
    ("sm_llm.worker.save_writer:write_distributed", 1, 1, "before"),
    ("sm_llm.storage.publish:seal", 2, "all", "after"),
    ("sm_llm.worker.strategies.fsdp:FsdpStrategy.clip_grad_norm", 7, "all", "before"),
    ("sm_llm.storage.publish:publish", 2, 0, "before"),
    ("sm_llm.storage.folder:FolderStore.put_if_absent", 4, "all", "after"),
    ("sm_llm.storage.publish:collect_garbage", 2, 0, "before"),
    (STEP, 8, 1, "after"),
]
"""What is called, at which call, in which processes, and whether before or after it."""


@pytest.mark.integration
@pytest.mark.timeout(1800)
def test_a_run_killed_eight_times_equals_an_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    with Nodes(whole, nodes=1, processes=2, **TASK) as job:
        job.ended()
        assert job.torchruns[0].returncode == 0, job.log()
    for attempt, kill in enumerate(KILLS, start=1):
        with Nodes(run, nodes=1, processes=2, attempt=attempt, before=f"{ARM}arm(*{kill!r})", **TASK) as job:
            job.ended()
            assert job.torchruns[0].returncode != 0, f"{kill} killed nothing\n{job.log()}"
            assert "Signal 9 (SIGKILL)" in job.log(), f"{kill} killed nothing\n{job.log()}"
            assert all(info.valid for info in list_checkpoints(open_store(run))), kill
            assert find_final(open_store(run), run_id="run") is None
    with Nodes(run, nodes=1, processes=2, attempt=len(KILLS) + 1, **TASK) as job:
        job.ended()
        assert job.torchruns[0].returncode == 0, job.log()
    assert exact_steps(run) == exact_steps(whole)
    assert list(exact_steps(run)) == list(range(1, STEPS + 1))
    chosen = [event["step"] for event in events(run, "start_chosen")]
    assert chosen == sorted(chosen), "no commit was ever lost"
    assert len(chosen) == len(KILLS) + 1
    assert chosen[-1] > 0
    assert find_final(open_store(run), run_id="run") is not None
