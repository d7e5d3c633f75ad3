"""Starts, watches and signals local runs: a run's store, its lock and its supervisor process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import LaunchRefused, SubmitError
from sm_llm.launcher.backends.local.attempt import python_path, request_file
from sm_llm.launcher.backends.local.contract import emulated
from sm_llm.launcher.observe.logs import last_lines
from sm_llm.owned import make_folders, opener
from sm_llm.runs import run_lock
from sm_llm.runs.heartbeat import SILENT_SECONDS
from sm_llm.runs.locate import assert_own_folder, launch_folder
from sm_llm.runs.outcome import recorded_end, unstarted
from sm_llm.runs.results import has_final
from sm_llm.runs.run_lock import is_anyone_alive, is_starting
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState
from sm_llm.storage.files import write_atomically
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backend import Submission
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore

LEAVE_SECONDS = 30.0
"""How long a supervisor may take to go once it has recorded the end of its attempt."""
_POLL_SECONDS = 0.05
READY = b"ready\n"
SUPERVISOR = "sm_llm.launcher.backends.local.supervisor"


def start(submission: Submission) -> str:
    """Write the submission into the run's folder and start its supervisor; returns its process id."""
    write_submission(submission)
    return start_supervisor(job_run_store(submission.job), submission.job.attempt)


def write_submission(submission: Submission) -> None:
    """job.json and the request, as the attempt reads them here, and in S3 a copy of both."""
    run_store, attempt = job_run_store(submission.job), submission.job.attempt
    request = request_file(run_store.paths, attempt)
    write_atomically(request, json.dumps(submission.request, indent=2) + "\n")
    submission.job.write(run_store.paths.job_file)
    if (contract := emulated(submission.job.spec)) is not None:
        contract.upload(submission)
    run_store.keep(request)
    run_store.keep(run_store.paths.job_file)


@contextmanager
def starting(run_store: RunStore, number: int) -> Iterator[Attempt]:
    """Hold the run's starting lock around the start of attempt ``number``, which is given as it is to be claimed.

    Raises ``LaunchRefused`` if the run is alive or is just being started, here or elsewhere.
    """
    assert_own_folder(run_store)
    with run_lock.starting(run_store.root) as mine:
        record = run_store.record()
        if not mine or _is_alive_here(run_store, record) or is_alive_elsewhere(run_store, record):
            raise LaunchRefused(running_message(run_store, record))
        run_store.beat(number)  # before the claim: whoever sees the claim shall find it alive
        yield Attempt.claim(number)


def _is_alive_here(run_store: RunStore, record: RunRecord) -> bool:
    """Whether a process of the run is alive on this machine; one that has recorded its end is given time to go."""
    deadline = time.monotonic() + (LEAVE_SECONDS if recorded_end(record) else 0)
    while is_anyone_alive(run_store.root):
        if time.monotonic() >= deadline:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def is_alive_elsewhere(run_store: RunStore, record: RunRecord) -> bool:
    """Whether an attempt that another machine runs has given a sign of life lately."""
    last = record.attempts[-1] if record.attempts else None
    if last is None or last.state is not None or run_store.has_originals(last.number):
        return False  # on a folder, and here, the lock decides
    if last.is_claim and last.host == socket.gethostname():
        return False  # a launch on this machine has got no further
    quiet = run_store.silence()
    return quiet is not None and quiet < SILENT_SECONDS


def running_message(run_store: RunStore, record: RunRecord) -> str:
    """The message for a start of a run that is running."""
    last = record.attempts[-1] if record.attempts else None
    pid = last.native_id if last is not None and last.native_id else "unknown"
    elsewhere = f" on {last.host}" if last is not None and last.host not in (None, socket.gethostname()) else ""
    grace = (
        f" If that machine is gone, its silence is noticed after {SILENT_SECONDS:.0f} s." if run_store.is_remote else ""
    )
    return (
        f"{record.run_id} is running already (process {pid}{elsewhere}).{grace} Follow it with: "
        f"sm-llm logs {quoted(run_store.uri)} --follow, or start another run of the same specification with --new"
    )


def start_supervisor(run_store: RunStore, attempt: int) -> str:
    """Start the detached supervisor of a claimed attempt; returns its process id once it holds the run's lock.

    It works where this process does; the folder of relative inputs is data, nothing runs there. Raises ``SubmitError``
    if the supervisor ends at once.
    """
    return _spawn(run_store, attempt, launch_folder(run_store, run_store.record()) or Path.cwd())


def _spawn(run_store: RunStore, attempt: int, folder: Path) -> str:
    log = run_store.paths.logs(attempt) / "supervisor.log"
    make_folders(log.parent)
    # The supervisor reports through a pipe that it holds the lock. If it dies, the pipe closes, so the read cannot
    # hang.
    reader, writer = os.pipe()
    try:
        with open(log, "ab", opener=opener) as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", SUPERVISOR, run_store.uri, str(writer), _options(run_store), str(folder)],
                env={**os.environ, **python_path(os.environ)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,  # a closing terminal or Ctrl-C there does not reach it
            )
    finally:
        # From here on the supervisor alone holds the writing end.
        os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            ready = pipe.read() == READY
    except BaseException:  # Ctrl-C: it is in a session of its own and would continue
        process.terminate()
        process.wait()
        raise
    if not ready:
        process.wait()
        cause = "\n".join(last_lines(log, 20)) or f"exit code {process.returncode}"
        raise SubmitError(f"{run_store.uri}: the run's supervisor could not start:\n{cause}")
    return str(process.pid)


def _options(run_store: RunStore) -> str:
    return json.dumps(asdict(run_store.options) if run_store.options is not None else {})


def state(run_store: RunStore) -> tuple[RunState, str | None]:
    """The state of a run and its reason. A record left open by a killed supervisor is completed by what is true.

    An attempt that ends, or begins, between the read of the record and the search for its processes has changed the
    record, which is then read anew.
    """
    if run_store.is_remote and is_anyone_alive(run_store.root):
        return RunState.RUNNING, None  # without asking the store: whoever watches it here can do without
    record = run_store.record()
    while (end := recorded_end(record)) is None:
        found = _current_state(run_store, record)
        if found[0] is RunState.RUNNING or (now := run_store.record()).attempts == record.attempts:
            return found
        record = now
    return end.state, end.reason


def _current_state(run_store: RunStore, record: RunRecord) -> tuple[RunState, str | None]:
    """The state of a run whose record holds no end, from its processes and what it has published."""
    last = record.attempts[-1] if record.attempts else None
    if is_anyone_alive(run_store.root) or is_alive_elsewhere(run_store, record):
        return (RunState.RUNNING if last else RunState.PENDING), None
    if last is None:
        return RunState.PENDING, unstarted(record, time.time())
    if last.is_claim and is_starting(run_store.root):
        return RunState.PENDING, None
    # A supervisor that was killed after the publication has left a result without an end in the record.
    if "steps" not in record.spec and has_final(run_store, record.run_id):
        return RunState.COMPLETED, None
    return RunState.INTERRUPTED, "its processes were killed"


def signal_supervisor(run_store: RunStore, pid: int, number: signal.Signals = signal.SIGTERM) -> None:
    """Signal the supervisor of a run. Raises ``SubmitError`` if process ``pid`` is not it (any more)."""
    if not is_supervisor(run_store, pid):
        raise SubmitError(
            f"{run_store.uri}: process {pid} is not this run's supervisor; the run is not running on this machine"
        )
    os.kill(pid, number)


def stop(run_store: RunStore, pid: int, *, now: bool = False) -> None:
    """Ask a run to stop, or (``now``) kill it. Raises ``SubmitError`` if its supervisor is not to be found.

    From another machine, a stop file or object asks for it; nothing can be killed from there.
    """
    last = run_store.record().attempts[-1]
    if _runs_elsewhere(run_store, last, pid):
        if now:
            raise SubmitError(f"{run_store.uri}: it runs on {last.host} and can be killed only there")
        run_store.request_stop(last.number)
        return
    signal_supervisor(run_store, pid)
    if now:
        signal_supervisor(run_store, pid, signal.SIGINT)  # after SIGTERM it kills; in either order


def _runs_elsewhere(run_store: RunStore, attempt: Attempt, pid: int) -> bool:
    if not run_store.has_originals(attempt.number):
        return True
    # Machines can share a folder, and the folder of copies.
    return attempt.host not in (None, socket.gethostname()) and not is_supervisor(run_store, pid)


def supervised_run(pid: int) -> str | None:
    """The address of the run of the supervisor with this process id, or None if it is not a supervisor."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    arguments = [part.decode() for part in command]
    # Without the last argument, because the address follows the module's name.
    return arguments[arguments.index(SUPERVISOR) + 1] if SUPERVISOR in arguments[:-1] else None


def is_supervisor(run_store: RunStore, pid: int) -> bool:
    """Whether ``pid`` is alive and supervises the run: process ids are used again."""
    return supervised_run(pid) == run_store.uri
