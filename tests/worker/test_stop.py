"""Stopping in an orderly way: two nodes under real torchruns, asked through one process, or by a file."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pytest
from nodes import Nodes, holding
from worker_jobs import exact_steps, losses, search_path

from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_states import RunState
from sm_llm.runs.stopped import StopRecord
from sm_llm.storage.publication.publish import find_newest, list_checkpoints
from sm_llm.storage.uri import open_store
from sm_llm.worker.runtime.compiler_cache import FOLDER_ENVIRONMENT
from sm_llm.worker.runtime.stop import StopRequests
from sm_llm.worker.transfer import agent_process

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


# A compiler that leaves a mark when it begins with a kernel, which takes it seconds.
COMPILER = """#!/bin/sh
case "$*" in *.main.cpp*) : > {mark};; esac
exec g++ "$@"
"""


@pytest.mark.integration
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_while_layers_are_compiled_is_a_stop_with_a_checkpoint(tmp_path: Path, processes: int) -> None:
    """torchrun signals the process groups of its workers, and so the compilers that they have started."""
    mark, compiler = tmp_path / "compiles", tmp_path / "g++-marking"
    compiler.write_text(COMPILER.format(mark=mark))
    compiler.chmod(0o700)
    environ = {"CXX": str(compiler), FOLDER_ENVIRONMENT: str(tmp_path / "cache")}
    environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else a program is compiled for each instruction set, to try it
    task: dict[str, Any] = {"precision": {"compile": True}, "global_batch_size": 4, "validation": {"every_steps": 1000}}
    with Nodes(tmp_path / "run", nodes=1, processes=processes, environ=environ, **task) as job:
        job.until(mark.exists)
        job.torchruns[0].send_signal(signal.SIGTERM)
        job.ended()
        record = job.stops()[0]
    assert record is not None, job.log()
    assert record.checkpoint == record.step in (1, 2), job.log()
    assert not job.container(0).failure.exists(), "a stop is no failure"


# A loop that waits for a compiler, which signals the group of both and ends once the signal was noted.
SHIELDED = """
import json, subprocess, threading, time
from sm_llm.worker.runtime.compiler_cache import FOLDER_ENVIRONMENT
from sm_llm.worker.runtime.stop import StopRequests

def answer():
    while requests.signalled_at is None:
        time.sleep(0.01)
    child.stdin.close()

requests = StopRequests(2)
requests.install(print)
with requests.deferred(), requests.shielded():
    child = subprocess.Popen(["sh", "-c", "kill -{number} 0; read line; exit 7"], stdin=subprocess.PIPE)
    threading.Thread(target=answer).start()
    code = child.wait()
after = subprocess.run(["sh", "-c", "kill -{number} $$"]).returncode
print(json.dumps([code, requests.reason, -after]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_process_group_is_noted_at_once_and_spares_what_the_loop_has_started(
    number: signal.Signals,
) -> None:
    program = SHIELDED.replace("{number}", number.name.removeprefix("SIG"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": search_path()},
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=200,
        check=True,
    )
    assert json.loads(done.stdout) == [7, f"{number.name} to rank 2", number]


# The processes in which torch compiles Triton's kernels, started and signalled in the loop.
POOL = """
import operator, os, signal, time
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from sm_llm.worker.runtime.stop import StopRequests

requests = StopRequests()
requests.install(print)
with requests.deferred(), requests.shielded():
    pool = SubprocPool(2)
    assert pool.submit(operator.add, 1, 2).result() == 3, "it has started its processes"
    work = pool.submit(time.sleep, 1)
    os.killpg(0, signal.SIGTERM)
    work.result()
    print(pool.submit(operator.add, 1, 3).result(), requests.reason)
    pool.shutdown()
"""


@pytest.mark.integration
def test_a_signal_to_the_process_group_spares_the_processes_in_which_torch_compiles() -> None:
    argv, environ = [sys.executable, "-c", POOL], {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, start_new_session=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, "4 SIGTERM to rank 0\n"), done.stderr


# A process that the loop has forked, with all open files, and which outlives it.
FORKED = """
import os, time
from sm_llm.worker.runtime.stop import StopRequests

requests = StopRequests()
requests.install(print)
with requests.deferred(), requests.shielded():
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
print("left")
os.kill(child, 9)
"""


def test_the_loop_ends_beside_a_process_that_it_has_forked() -> None:
    argv, environ = [sys.executable, "-c", FORKED], {**os.environ, "PYTHONPATH": search_path()}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr


def test_signals_are_not_blocked_in_a_process_that_does_not_handle_them() -> None:
    with StopRequests().shielded():
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_transfer_agent_that_a_shielded_loop_starts_gets_the_signal() -> None:
    """It has a time of its own after the signal, and then ends by itself."""
    ours, theirs = socket.socketpair()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    try:
        argv = [sys.executable, "-m", agent_process.__name__, str(theirs.fileno()), "0.01", "5"]
        agent = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": search_path()}, pass_fds=[theirs.fileno()])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    with Connection(ours.detach()) as connection:
        connection.send((len, (), {}))
        assert connection.recv()[0] == "failed", "an answer: it has set itself up"
        agent.terminate()
        assert agent.wait(60) == agent_process.ENDED


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
