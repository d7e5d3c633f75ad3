"""The fork server of the tests: what it starts behaves as if an interpreter of its own had started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.preloaded import Preloaded

pytestmark = pytest.mark.integration
ABOUT = """
import json, os, sys
known = "torch" in sys.modules, [it for it in sys.modules if it.startswith("sm_llm")]
print(json.dumps([os.getpid(), sys.argv, os.getcwd(), os.environ["MARK"], __name__, __file__, sys.path[0], *known]))
print("read", sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""
WAITS = """
import os, signal, sys, time
def leave(number, frame):
    print("asked to stop", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, leave)
print(os.getpid(), flush=True)
time.sleep(300)
"""


@pytest.fixture
def start(tmp_path: Path, preloaded: Preloaded) -> Any:
    """Starts a program as torchrun starts a worker."""

    def start(text: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        (tmp_path / "program.py").write_text(text)
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": "1", **variables}
        argv = [sys.executable, "-u", str(tmp_path / "program.py"), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=environ, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    return start


def test_a_program_has_its_own_arguments_surroundings_streams_and_end(start: Any, tmp_path: Path) -> None:
    process = start(ABOUT, "a b", "", MARK="x\ny")
    printed, errors = process.communicate("text", timeout=120)
    pid, *rest = json.loads(printed)
    assert pid != process.pid, "it was forked"
    script, folder = str(tmp_path / "program.py"), str(tmp_path)
    assert rest == [[script, "a b", ""], folder, "x\ny", "__main__", script, folder, True, []]
    assert (errors, process.returncode) == ("read text\n", 7)


def test_one_that_reads_other_variables_at_import_starts_as_always(start: Any) -> None:
    process = start(ABOUT, MARK="x", HF_ENDPOINT="http://127.0.0.1:1")
    printed, _ = process.communicate("", timeout=120)
    pid, *_, has_torch, _ = json.loads(printed)
    assert (pid, has_torch, process.returncode) == (process.pid, False, 7)


def test_a_signal_reaches_it_and_its_end_is_that_of_the_stand_in(start: Any) -> None:
    process = start(WAITS)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "asked to stop\n"
    assert process.returncode == 3
    process = start(WAITS)
    os.kill(int(process.stdout.readline()), signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


def test_it_dies_with_its_stand_in(start: Any) -> None:
    process = start(WAITS)
    other = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(other):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.01)
