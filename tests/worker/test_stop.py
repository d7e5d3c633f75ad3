"""Stopping in an orderly way: two nodes under real torchruns, asked through one process, or by a file."""

from __future__ import annotations

import math
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from nodes import Nodes, holding
from worker_jobs import exact_steps, losses

from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_states import RunState
from sm_llm.runs.stopped import StopRecord
from sm_llm.storage.publication.publish import find_newest, list_checkpoints
from sm_llm.storage.uri import open_store
from sm_llm.worker.runtime.stop import StopRequests

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_CK18_a_signal_to_one_process_stops_both_nodes_at_the_same_step_with_a_checkpoint(
    tmp_path: Path, forks: dict[str, str], number: signal.Signals
) -> None:
    with Nodes(tmp_path / "run", environ=forks) as job:
        job.until_step(10)
        os.kill(job.workers(1)[0], number)
        job.ended()
        stops = job.stops()
    assert stops[0] == stops[1], job.log()
    record = stops[0]
    assert record is not None
    assert record.reason == f"{number.name} to rank 1"
    assert record.checkpoint == record.step == max(losses(tmp_path / "run"))
    assert record.state is RunState.INTERRUPTED
    newest = find_newest(open_store(tmp_path / "run"), run_id="run").commit
    assert newest is not None
    assert newest.save.step == record.step
    assert not job.container(0).failure.exists(), "a stop is no failure"
    assert job.events("stopped")[0]["checkpoint"] == record.step


@pytest.mark.integration
def test_a_stop_file_stops_the_job_and_a_second_attempt_continues_bit_for_bit(
    tmp_path: Path, forks: dict[str, str]
) -> None:
    short: dict[str, Any] = {"max_steps": 12, "checkpoint": {"every_steps": 1000}, "environ": forks}
    with Nodes(tmp_path / "whole", **short) as whole:
        whole.ended()
    stop_file = RunPaths(tmp_path / "run").stop_file
    before = "from sm_llm.worker.runtime import stop\nstop._POLL_SECONDS = 0.0\n" + holding(7, stop_file)
    with Nodes(tmp_path / "run", before=before, **short) as job:
        job.until_step(5)
        stop_file.touch()
        job.ended()
        record = job.stops()[0]
    assert record is not None, job.log()
    assert record.reason == "the stop file"
    assert 6 <= (record.step or 0) < 12  # a slow worker sees the file before step 6, a fast one waits before step 7
    stop_file.unlink()
    with Nodes(tmp_path / "run", attempt=2, **short) as again:
        again.ended()
    assert [it.returncode for it in again.torchruns] == [0, 0], again.log()
    assert exact_steps(tmp_path / "run") == exact_steps(tmp_path / "whole")


@pytest.mark.integration
def test_CK18_a_save_longer_than_the_grace_time_is_not_begun(tmp_path: Path, forks: dict[str, str]) -> None:
    slow = (
        "import time\nfrom sm_llm.storage.publication import publish\nreal = publish.publish\n"
        "publish.publish = lambda *a, **k: (time.sleep(1.5), real(*a, **k))[1]\n"
    )
    task = {"checkpoint": {"every_steps": 6, "async_save": False}, "validation": {"every_steps": 1000}}
    with Nodes(tmp_path / "run", environ=forks, before=slow, stop_seconds=3.0, **task) as job:
        job.until(lambda: job.events("checkpoint_published"))
        for process in job.torchruns:
            process.send_signal(signal.SIGTERM)
        job.ended()
        record = job.stops()[0]
    assert record is not None, job.log()
    assert "of the grace time are left" in record.detail
    steps = [info.step for info in list_checkpoints(open_store(tmp_path / "run"))]
    assert record.checkpoint == max(steps)
    assert record.checkpoint < (record.step or 0) or record.step in steps
    assert record.state is RunState.INTERRUPTED


@pytest.mark.integration
def test_a_signal_before_the_first_step_ends_the_job_without_a_failure(tmp_path: Path, forks: dict[str, str]) -> None:
    waits = (
        "import time, pathlib, os\nfrom sm_llm.worker.tasks import train\n"
        "def slow(*_):\n    pathlib.Path(os.environ['SAGEMAKER_BASE_DIR'], 'up').touch(); time.sleep(3600)\n"
        "train.set_up = slow\n"
    )
    with Nodes(tmp_path / "run", environ=forks, before=waits) as job:
        job.until(lambda: all((job.container(node).base / "up").exists() for node in range(2)))
        for process in job.torchruns:
            process.send_signal(signal.SIGTERM)
        job.ended()
        stops = job.stops()
    assert all(record is not None and record.step is None for record in stops), job.log()
    assert not job.container(0).failure.exists()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_request_counts_and_a_file_sets_no_limit_of_time(tmp_path: Path) -> None:
    clock = Clock()
    requests = StopRequests(3, clock)
    with requests.deferred():
        requests.check_file(tmp_path / "stop")
        assert requests.reason is None
        (tmp_path / "stop").touch()
        requests.check_file(tmp_path / "stop")
        assert requests.reason is None, "looked a moment ago"
        clock.now = 1.5
        requests.check_file(tmp_path / "stop")
        assert requests.reason == "the stop file"
        assert requests.seconds_left(30) is None
        requests._on_signal(signal.SIGTERM, None)
        clock.now = 11.5
        assert requests.reason == "the stop file"
        assert requests.seconds_left(30) == 20
        requests._on_signal(signal.SIGTERM, None)
        assert requests.seconds_left(30) == 20, "the grace time begins with the first signal"


def test_a_request_outside_the_loop_ends_the_process_at_once() -> None:
    requests, ended = StopRequests(1), list[str]()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        requests.install(ended.append)
        with requests.deferred():
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not ended
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == ["SIGUSR1 to rank 1"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


AFTER = StopRecord(reason="x", step=4, checkpoint=4)
BEFORE = StopRecord(reason="x", detail="why")


@pytest.mark.parametrize(
    ("record", "sentence", "state"),
    [
        (AFTER, "stopped after step 4 (x); the checkpoint of step 4 is safe", RunState.INTERRUPTED),
        (BEFORE, "stopped before the first step (x); no checkpoint: why", RunState.STOPPED),
    ],
)
def test_a_stop_states_what_is_safe(tmp_path: Path, record: StopRecord, sentence: str, state: RunState) -> None:
    assert (record.sentence, record.state) == (sentence, state)
    record.write(tmp_path / "stopped")
    assert StopRecord.read(tmp_path / "stopped") == record
    assert StopRecord.read(tmp_path / "nothing") is None


def test_an_infinite_grace_time_is_that_of_a_process_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    from sm_llm.worker.supervision.agreed_stop import torchrun_seconds

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert torchrun_seconds() == math.inf
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert torchrun_seconds() == 30
