"""Child processes of the supervisor: started with a port of their own, asked to stop, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that the kernel gives to nobody else while the context lasts.

    The socket stays bound without listening; a server that sets SO_REUSEADDR, as torch's store does, may still take
    the port, but no bind to port 0 of another run can be handed the same one.
    """
    with socket.socket() as holder:
        # Both sides need it: Linux lets two sockets share a port only if each has set it, and none listens yet.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def adopt_orphans() -> None:
    """Make this process the new parent of its descendants' orphans, so that ``kill_descendants`` sees them all."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(argv: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start one node in ``folder``; its output is appended to ``log``. It gets SIGTERM when this process dies.

    Call it from the main thread of a process without other threads: the death signal follows the *thread* that
    started the child, and code between fork and exec is only safe without other threads.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )


class Interrupts:
    """How urgently this process was asked to stop: SIGTERM, or a file, asks; SIGINT asks, or insists."""

    def __init__(self) -> None:
        self._asked = False
        self._insisted = 0
        self._file: Path | None = None

    @property
    def count(self) -> int:
        """0, or 1 once a stop was asked for, in whatever number of SIGTERMs, or more once it shall be at once."""
        asked = self._asked or (self._file is not None and os.path.exists(self._file))
        return asked + self._insisted

    def heed(self, stop_file: Path) -> None:
        """Take ``stop_file``, once it exists, for what SIGTERM asks."""
        self._file = stop_file

    def install(self) -> None:
        """Take over the signals, in the main thread; a hang-up is ignored."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._asked = True
        else:
            self._insisted += 1


@dataclass(frozen=True)
class Ended:
    """Exit codes of all nodes, and which node was the first seen to fail (the others were then made to end)."""

    codes: tuple[int, ...]
    first_failed: int | None
    failed_unasked: bool = False
    """Whether that was before anybody asked for a stop."""


def wait_for_all(
    nodes: Sequence[subprocess.Popen[bytes]],
    interrupts: Interrupts,
    *,
    grace_seconds: float,
    kill_seconds: float,
    stop_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Ended:
    """Wait for every node; a job is one thing, so one failed node ends the others.

    A stop that is asked for sends SIGTERM to all, one that shall be at once SIGKILL, and whoever is still there
    ``stop_seconds`` after the first gets SIGKILL, too. ``grace_seconds`` after a node failed the others get SIGTERM,
    for which nobody saves any more, and SIGKILL ``kill_seconds`` later.
    """
    passed_on = 0
    kill_at: float | None = None
    failed_at: float | None = None
    first_failed: int | None = None
    failed_unasked = False
    reported = False
    while True:
        # Polled, and not waited for: a wait for one node would not notice that another has failed.
        codes = [node.poll() for node in nodes]
        if first_failed is None:
            first_failed = next((index for index, code in enumerate(codes) if code), None)
            # Read once, when it is first seen to fail: a stop that comes later did not cause it.
            failed_unasked = first_failed is not None and not interrupts.count
        if None not in codes:
            return Ended(tuple(code or 0 for code in codes), first_failed, failed_unasked)
        now = clock()
        if (count := interrupts.count) > passed_on:
            send(nodes, signal.SIGTERM if count == 1 else signal.SIGKILL)
            # Only the first request sets the deadline: asking again does not extend it.
            passed_on, kill_at = count, kill_at or now + stop_seconds
        if failed_at is None and first_failed is not None:
            failed_at = now
            # A failure may only shorten what a stop has left, never extend it.
            kill_at = min(kill_at or math.inf, now + grace_seconds + kill_seconds)
        if failed_at is not None and not reported and now - failed_at >= grace_seconds:
            send(nodes, signal.SIGTERM)
            reported = True
        if kill_at is not None and now >= kill_at:
            send(nodes, signal.SIGKILL)
        sleep(POLL_SECONDS)


def send(nodes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Signal every node that still runs."""
    for node in nodes:
        if node.poll() is None:
            node.send_signal(number)


def await_descendants(interrupts: Interrupts, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until nothing is left below this process (orphans were adopted), a stop is urgent or the time is over."""
    deadline = time.monotonic() + seconds
    while (children := _children()) and time.monotonic() < deadline and interrupts.count < 2:
        for pid in children:
            # A child that has ended stays in the list until it is waited for.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        sleep(POLL_SECONDS)


def kill_descendants() -> int:
    """SIGKILL whatever is left below this process (orphans were adopted); returns how many were found."""
    killed = 0
    # Again until none is left: this process adopts the children of those that it kills.
    while children := _children():
        for pid in children:
            # It may have ended since the children were listed.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            killed += 1
    return killed


def _children() -> list[int]:
    # Other systems have no such file: there the nodes alone are signalled.
    listing = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(pid) for pid in listing.read_text().split()] if listing.exists() else []
