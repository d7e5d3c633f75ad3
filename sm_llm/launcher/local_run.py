"""Starts, watches and signals local runs: a run's folder, its lock and its supervisor process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.liveness import is_anyone_alive, starting
from sm_llm.contract.run_paths import RunPaths
from sm_llm.contract.run_record import RunRecord
from sm_llm.contract.states import RunState
from sm_llm.errors import SubmitError
from sm_llm.launcher.attempt import python_path, request_file
from sm_llm.launcher.logs import last_lines
from sm_llm.launcher.results import has_final

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.backends.base import Submission

READY = b"ready\n"
SUPERVISOR = "sm_llm.launcher.supervisor"
is_alive = is_anyone_alive


def start(submission: Submission, on_claimed: Callable[[], None] = lambda: None) -> str:
    """Write the submission into the run's folder and start its supervisor; returns its process id."""

    def prepare() -> None:
        on_claimed()
        write_submission(submission)

    return start_supervisor(Path(submission.job.run_uri), submission.job.attempt, prepare)


def write_submission(submission: Submission) -> None:
    """job.json and the request, as the attempt reads them."""
    paths = RunPaths(Path(submission.job.run_uri))
    request = request_file(paths, submission.job.attempt)
    request.parent.mkdir(parents=True, exist_ok=True)
    request.write_text(json.dumps(submission.request, indent=2) + "\n", encoding="utf-8")
    submission.job.write(paths.job_file)


def start_supervisor(root: Path, attempt: int, prepare: Callable[[], None] = lambda: None) -> str:
    """Start the detached supervisor of ``attempt``, after ``prepare()``; returns once it holds the run's lock.

    Raises ``SubmitError`` if the run is alive or is just being started, or if the supervisor dies at once.
    """
    with starting(root) as mine:
        record = RunRecord.read(RunPaths(root).record)
        if not mine or is_alive(root):
            raise SubmitError(running_message(root, record))
        if record.next_attempt != attempt:
            raise SubmitError(f"{root}: another launch got in between. Give the same command again")
        prepare()
        RunPaths(root).stop_file.unlink(missing_ok=True)
        return _spawn(root, attempt, record.host.get("folder", ""))


def running_message(root: Path, record: RunRecord) -> str:
    """What to tell someone who would start a run that is running."""
    pid = record.attempts[-1].native_id if record.attempts else "unknown"
    return (
        f"{record.run_id} is running already (process {pid}). Follow it with: sm-llm logs {root} --follow, "
        "or start another run of the same specification with --new"
    )


def _spawn(root: Path, attempt: int, folder: str) -> str:
    log = RunPaths(root).logs(attempt) / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", SUPERVISOR, str(root), str(writer)],
                env={**os.environ, **python_path(os.environ)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                cwd=folder if os.path.isdir(folder) else None,  # a workflow's inputs are relative to it
                start_new_session=True,  # a closing terminal or Ctrl-C there does not reach it
            )
    finally:
        os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        if pipe.read() != READY:
            process.wait()
            cause = "\n".join(last_lines(log, 20)) or f"exit code {process.returncode}"
            raise SubmitError(f"{root}: the run's supervisor could not start:\n{cause}")
    return str(process.pid)


def state(root: Path) -> tuple[RunState, str | None]:
    """The state of a run and its reason. A record left open by a killed supervisor is completed by what is true."""
    record = RunRecord.read(RunPaths(root).record)
    last = record.attempts[-1] if record.attempts else None
    if last is not None and last.state is not None and last.state.is_final:
        return last.state, last.reason
    if is_alive(root):
        return (RunState.RUNNING if last else RunState.PENDING), None
    if last is None:
        return RunState.PENDING, "was never started"
    if "steps" not in record.spec and has_final(root, record.run_id):
        return RunState.COMPLETED, None
    return RunState.INTERRUPTED, "its processes were killed"


def signal_supervisor(root: Path, pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Signal the supervisor of a run. Raises ``SubmitError`` if process ``pid`` is not it (any more)."""
    if not is_supervisor(root, pid):
        raise SubmitError(f"{root}: process {pid} is not this run's supervisor; the run is not running on this machine")
    os.kill(pid, number)


def stop(root: Path, pid: int, *, now: bool = False) -> None:
    """Ask a run to stop, or (``now``) kill it. Raises ``SubmitError`` if its supervisor is not to be found.

    From another machine that shares the folder, a stop file asks for it; nothing can be killed from there.
    """
    host = RunRecord.read(RunPaths(root).record).attempts[-1].host
    if host not in (None, socket.gethostname()) and not is_supervisor(root, pid):
        if now:
            raise SubmitError(f"{root}: it runs on {host} and can be killed only there")
        RunPaths(root).stop_file.touch()
        return
    signal_supervisor(root, pid)
    if now:
        signal_supervisor(root, pid, signal.SIGINT)  # the second signal kills; another number, or they could merge


def supervised_folder(pid: int) -> str | None:
    """The run's folder of the supervisor with this process id, or None if it is no supervisor."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    arguments = [part.decode() for part in command]
    return arguments[arguments.index(SUPERVISOR) + 1] if SUPERVISOR in arguments[:-1] else None


def is_supervisor(root: Path, pid: int) -> bool:
    """Whether ``pid`` is alive and supervises ``root``: process ids are used again."""
    return supervised_folder(pid) == str(root)
