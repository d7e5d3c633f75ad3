"""A run's lock lives exactly as long as its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import StorageError
from sm_llm.runs.run_lock import RunLock, hold, is_anyone_alive, starting
from sm_llm.runs.run_paths import RunPaths

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import sys
from pathlib import Path
from sm_llm.runs.run_lock import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def holder(root: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the lock until its input is closed or it is killed."""
    arguments = [sys.executable, "-c", HOLDER, str(root)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_run_is_alive_as_long_as_any_of_its_processes(tmp_path: Path) -> None:
    assert not is_anyone_alive(tmp_path)
    first, second = holder(tmp_path), holder(tmp_path)
    try:
        assert is_anyone_alive(tmp_path)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert is_anyone_alive(tmp_path)
        second.send_signal(signal.SIGKILL)
        second.wait()
        assert not is_anyone_alive(tmp_path)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_a_stopped_process_is_alive(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        assert is_anyone_alive(tmp_path)
    finally:
        process.kill()
        process.communicate()


def test_the_lock_ends_with_its_block(tmp_path: Path) -> None:
    with hold(tmp_path):
        assert is_anyone_alive(tmp_path)
    assert not is_anyone_alive(tmp_path)
    lock = RunLock(RunPaths(tmp_path).lock)
    assert lock.hold() is lock.hold()
    lock.release()
    lock.release()
    assert not is_anyone_alive(tmp_path)


def test_looking_neither_disturbs_a_start_nor_other_lookers(tmp_path: Path) -> None:
    with hold(tmp_path):
        pass
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(is_anyone_alive(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [False] * 4
    with hold(tmp_path):
        assert is_anyone_alive(tmp_path)


def test_only_one_launcher_starts_a_run(tmp_path: Path) -> None:
    with starting(tmp_path / "run") as mine:
        with starting(tmp_path / "run") as other:
            assert (mine, other) == (True, False)
        assert not is_anyone_alive(tmp_path / "run")
    with starting(tmp_path / "run") as again:
        assert again


def test_a_lock_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be opened for locking"):
        hold(tmp_path / "file" / "run")
