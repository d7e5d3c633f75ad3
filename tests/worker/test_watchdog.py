"""Jobs that stall: the silent or late rank is named, all stacks are logged, and the job ends."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from nodes import Nodes
from test_failure import breaking

from sm_llm.contract.failure import Cause
from sm_llm.worker.runtime.progress_marker import ProgressMarker
from sm_llm.worker.supervision.hang_report import RankReport, _behind
from sm_llm.worker.supervision.watchdog import thread_stacks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)
EAGER = {"stall_seconds": 10.0, "stall_factor": 2.0}
"""Longer than a busy machine keeps a process from its next step."""


@pytest.mark.integration
@pytest.mark.parametrize("rank", [1, 0])
def test_a_stopped_rank_is_named_and_the_others_report_their_stacks(
    tmp_path: Path, forks: dict[str, str], rank: int
) -> None:
    with Nodes(tmp_path / "run", environ=forks, watchdog=EAGER) as job:
        job.until_step(10)
        pid = job.workers(rank)[0]
        os.kill(pid, signal.SIGSTOP)
        other = job.torchruns[1 - rank]
        job.until(lambda: other.poll() is not None)
        failure = job.container(1 - rank).failure.read_text()
        (stalled,) = job.events("stalled")
        reported = job.events("stacks")
    assert stalled["silent"] == [rank]
    assert f"rank {rank} does not answer: its process {pid} is stopped (SIGSTOP)" in failure, job.log()
    assert failure.startswith(f"rank {rank}: stalled after step ")
    assert [event["rank"] for event in reported] == [1 - rank]
    assert reported[0]["text"].startswith("thread MainThread:")
    assert "worker/tasks/train.py" in reported[0]["text"]


@pytest.mark.integration
def test_a_rank_that_is_behind_is_named_with_its_stack(tmp_path: Path, forks: dict[str, str]) -> None:
    late = breaking(1, "import time; time.sleep(3600)")
    with Nodes(tmp_path / "run", environ=forks, before=late, watchdog=EAGER) as job:
        job.until(lambda: job.events("stalled"))
        job.ended()
        (stalled,) = job.events("stalled")
        reported = {event["rank"]: event for event in job.events("stacks")}
        failures = job.failures()
    assert set(reported) == {0, 1}
    assert "time.sleep(3600)" in reported[1]["text"], "the stack of the rank that sleeps"
    assert stalled["silent"] == []
    assert {it.cause for it in failures} == {Cause.STALLED}, job.log()
    assert failures[0].headline == failures[1].headline


@pytest.mark.integration
def test_a_rank_whose_data_never_come_is_named(tmp_path: Path, forks: dict[str, str]) -> None:
    starving = (
        "import os, time\nfrom sm_llm.worker.tasks import train\nreal = train.Batches.__next__\n"
        "def starve(self):\n    starve.calls += 1\n"
        "    if starve.calls == 6 and os.environ['RANK'] == '1': time.sleep(3600)\n    return real(self)\n"
        "starve.calls = 0\ntrain.Batches.__next__ = starve\n"
    )
    with Nodes(tmp_path / "run", environ=forks, before=starving, watchdog=EAGER) as job:
        job.until(lambda: job.events("stalled"))
        job.ended()
        (stalled,) = job.events("stalled")
        failures = job.failures()
    assert stalled["behind"] == [1], job.log()
    assert "behind the others: rank 1 (waiting for data)" in failures[0].message


@pytest.mark.integration
def test_a_watchdog_that_is_off_lets_a_job_wait(tmp_path: Path, forks: dict[str, str]) -> None:
    late = breaking(1, "import time; time.sleep(4)")
    with Nodes(
        tmp_path / "run",
        environ=forks,
        before=late,
        watchdog={"stall_seconds": 1.0, "stall_factor": 2.0, "enabled": False},
        max_steps=8,
    ) as job:
        job.ended()
        assert [it.returncode for it in job.torchruns] == [0, 0], job.log()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_progress_marker_knows_the_usual_step_and_leaves_pauses_out() -> None:
    clock = Clock()
    marker = ProgressMarker(clock)
    clock.now = 100
    assert marker.seconds_without_step() is None, "the start is no step"
    marker.begin(7)
    for step, seconds in enumerate([60, 1, 2, 3], start=8):  # the first warms up
        clock.now += seconds
        marker.done(step)
    assert (marker.step, marker.median_seconds) == (11, 2)
    with marker.during("validation"):
        clock.now += 50
        assert marker.seconds_without_step() is None
        assert marker.phase == "validation"
    clock.now += 2
    assert marker.seconds_without_step() == 2
    marker.done(12)
    assert marker.median_seconds == 2


class Watched(ProgressMarker):
    """A pulse with an observer, called after everything that its writer sets or before all that its reader takes."""

    written = read = staticmethod(lambda: None)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name not in ("written", "read"):
            self.written()

    def __getattribute__(self, name: str) -> Any:
        if name in ("_mark", "_stepping", "_clock"):
            super().__getattribute__("read")()
        return super().__getattribute__(name)


def test_the_start_is_at_no_moment_taken_for_a_step() -> None:
    clock, seen = Clock(), list[float | None]()
    marker = Watched(clock)
    clock.now = 100
    marker.written = lambda: seen.append(marker.seconds_without_step())  # type: ignore[method-assign]
    marker.begin(7)
    assert set(seen) == {None, 0}


@pytest.mark.parametrize(("begins", "moment"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)])
def test_a_phase_is_not_taken_for_a_step_whenever_the_reader_is_held_up(begins: bool, moment: int) -> None:
    """The phase ends, or begins and ends, between any two reads of the watchdog's thread."""
    clock = Clock()
    marker = Watched(clock)
    marker.begin(7)
    phase = marker.during("validation")
    if not begins:
        phase.__enter__()
        clock.now = 100

    def act() -> None:
        nonlocal moment
        moment -= 1
        if moment == -1:
            if begins:
                phase.__enter__()
                clock.now = 100
            phase.__exit__(None, None, None)

    marker.read = act  # type: ignore[method-assign]
    found = marker.seconds_without_step()
    del marker.read
    assert found in (None, 0)
    assert moment < 0, "the phase took place"


@pytest.mark.parametrize(
    ("locations", "behind"),
    [
        ([(5, "step"), (5, "step")], []),
        ([(5, "step"), (4, "step"), (5, "step")], [1]),
        ([(5, "step"), (5, "waiting for data")], [1]),
        ([(5, "waiting for data"), (5, "waiting for data")], []),
        ([(6, "waiting for data"), (5, "step")], [1]),
    ],
)
def test_who_is_behind(locations: list[tuple[int, str]], behind: list[int]) -> None:
    answers = [RankReport(rank, step, phase, "") for rank, (step, phase) in enumerate(locations)]
    assert _behind(answers) == behind


def test_stacks_show_every_thread_but_the_one_that_looks() -> None:
    text = thread_stacks()
    assert text.startswith("thread MainThread:")
    assert "test_stacks_show_every_thread" in text
    import threading

    assert "test_stacks_show_every_thread" not in thread_stacks(skip=threading.get_ident())
