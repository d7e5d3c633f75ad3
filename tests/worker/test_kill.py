"""Jobs of two processes that are killed with SIGKILL: one process or all, in steps and in saves, and whole machines."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from nodes import Nodes, holding
from worker_jobs import events, exact_steps

from sm_llm.storage.publication.publish import find_final, list_checkpoints
from sm_llm.storage.uri import open_store
from tests.fixtures.sampling import pick

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
STEPS = 60
TASK: dict[str, Any] = {
    "max_steps": STEPS,
    "checkpoint": {"every_steps": 5, "verify_state": True},
    "logging": {"every_steps": 1},
}
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
STEP = "sm_llm.worker.tasks.train:Trainer.take_step"
KILLS = [
    (STEP, 9, "all", "before"),
    ("sm_llm.worker.checkpoint.save_writer:write_distributed", 1, 1, "before"),
    ("sm_llm.storage.publication.publish:seal", 2, "all", "after"),
    ("sm_llm.worker.strategies.fsdp.strategy:FsdpStrategy.update", 7, "all", "before"),
    ("sm_llm.storage.publication.publish:publish", 2, 0, "before"),
    ("sm_llm.storage.folder:FolderStore.put_if_absent", 4, "all", "after"),
    ("sm_llm.storage.publication.publish:collect_garbage", 2, 0, "before"),
    (STEP, 8, 1, "after"),
]
"""What is called, at which call, in which processes, and whether before or after it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: dict[str, str]) -> Path:
    """The run of a job that nothing befell."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with Nodes(run, nodes=1, processes=2, environ=forks, **TASK) as job:
        job.ended()
        assert job.torchruns[0].returncode == 0, job.log()
    return run


def assert_finished_alike(run: Path, whole: Path) -> None:
    assert exact_steps(run) == exact_steps(whole)
    assert list(exact_steps(run)) == list(range(1, STEPS + 1))
    assert find_final(open_store(run), run_id="run") is not None


def test_a_run_killed_again_and_again_equals_an_unbroken_one_bit_for_bit(
    tmp_path: Path, whole: Path, forks: dict[str, str]
) -> None:
    run, kills = tmp_path / "run", pick(KILLS, 4)
    for attempt, kill in enumerate(kills, start=1):
        arm = f"{ARM}arm(*{kill!r})"
        with Nodes(run, nodes=1, processes=2, attempt=attempt, environ=forks, before=arm, **TASK) as job:
            job.ended()
            assert job.torchruns[0].returncode != 0, f"{kill} killed nothing\n{job.log()}"
            assert "Signal 9 (SIGKILL)" in job.log(), f"{kill} killed nothing\n{job.log()}"
            assert all(info.valid for info in list_checkpoints(open_store(run))), kill
            assert find_final(open_store(run), run_id="run") is None
    with Nodes(run, nodes=1, processes=2, attempt=len(kills) + 1, environ=forks, **TASK) as job:
        job.ended()
        assert job.torchruns[0].returncode == 0, job.log()
    assert_finished_alike(run, whole)
    chosen = [event["step"] for event in events(run, "start_chosen")]
    assert chosen == sorted(chosen), "no commit was ever lost"
    assert len(chosen) == len(kills) + 1
    assert chosen[-1] > 0


def test_CK23_a_killed_run_of_two_nodes_continues_and_equals_an_unbroken_one(
    tmp_path: Path, whole: Path, forks: dict[str, str]
) -> None:
    run, step = tmp_path / "run", random.Random().randrange(10, 30)
    with Nodes(run, environ=forks, before=holding(50, tmp_path / "never"), **TASK) as job:
        job.until(lambda: job.events("checkpoint_published"))
        job.until_step(step)
        job.kill()
    with Nodes(run, attempt=2, environ=forks, **TASK) as job:
        job.ended()
        assert [it.returncode for it in job.torchruns] == [0, 0], job.log()
    chosen = events(run, "start_chosen")
    assert chosen[1]["source"] == "checkpoint", f"killed at step {step}"
    assert chosen[1]["step"] > 0
    assert all(info.valid for info in list_checkpoints(open_store(run)))
    assert_finished_alike(run, whole)
