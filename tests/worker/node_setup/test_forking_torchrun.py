"""torchrun whose processes are forked from it: they are those of torchrun, and begin with torch loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from worker_jobs import job_environment, job_file, train_task

from sm_llm.worker.node_setup import forking_torchrun
from sm_llm.worker.node_setup.forking_torchrun import can_fork

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
ENTRY = """
import os, sys
words = os.environ["RANK"], os.environ["TORCHELASTIC_USE_AGENT_STORE"], "torch" in sys.modules, sys.argv[1:]
sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: torchrun reads the file of a process while it grows
sys.stdout.flush()
raise SystemExit(int(os.environ["CODE"]) if os.environ["RANK"] == "1" else 0)
"""


def started(folder: Path, code: int, strategy: str = "fsdp", **variables: str) -> subprocess.CompletedProcess[str]:
    """Two processes of ``ENTRY`` on one node."""
    (folder / "entry.py").write_text(ENTRY)
    argv = [sys.executable, "-P", "-m", forking_torchrun.__name__, "--nproc-per-node=2", "--standalone", "--tee=3"]
    job = job_file(train_task(parallelism={"strategy": strategy}), folder / "run", 2)
    environ = {**os.environ, **job_environment(job), "CODE": str(code), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [*argv, f"--log-dir={folder}", str(folder / "entry.py"), "argument"],
        env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [0, 3])
def test_processes_begin_with_torch_loaded_and_their_end_is_torchruns(tmp_path: Path, code: int) -> None:
    done = started(tmp_path, code)
    lines = sorted(it.partition(":")[2] for it in done.stdout.splitlines() if "argument" in it)
    assert lines == [f"{rank} True True ['argument']" for rank in range(2)], done.stdout + done.stderr
    assert done.returncode == (0 if code == 0 else 1), done.stderr


@pytest.mark.timeout(300)
def test_libraries_that_need_a_process_of_their_own_have_it(tmp_path: Path) -> None:
    assert started(tmp_path, 0, "smp").stdout.count("True False ['argument']") == 2


@pytest.mark.timeout(300)
def test_what_cannot_be_imported_is_left_to_the_entrypoint(tmp_path: Path) -> None:
    """It installs what an image lacks, before it imports anything."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "pydantic.py").write_text("raise ImportError('not in this image')\n")
    done = started(tmp_path, 0, PYTHONPATH=f"{tmp_path / 'without'}:{ROOT}")
    assert done.stdout.count("True False ['argument']") == 2, done.stdout + done.stderr
    assert done.returncode == 0


class Driver:
    """libcuda, in which ``cuInit`` was called or not."""

    def __init__(self, answer: int) -> None:
        self.answer = answer

    def cuDeviceGetCount(self, count: Any) -> int:
        return self.answer


def test_a_process_that_has_used_a_GPU_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests before it may have left threads of servers and pools in this process.
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    def absent(*_: Any, **__: Any) -> Any:
        raise OSError("not loaded")

    assert can_fork(absent)
    assert can_fork(lambda *_, **__: Driver(3))
    assert not can_fork(lambda *_, **__: Driver(0))


def test_a_process_with_threads_is_not_forked() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not can_fork(lambda *_, **__: Driver(3))
    finally:
        ended.set()
        thread.join()
