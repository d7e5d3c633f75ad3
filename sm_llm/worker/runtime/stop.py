"""Who asked this process to stop: a signal, or a stop file in the run's folder."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import FrameType

    from sm_llm.runs.stopped import StopRecord

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""A platform's end, a scheduler's early warning, a person's Ctrl-C below a bare torchrun."""
_POLL_SECONDS = 1.0
_NO_SIGNAL = b"\0"
"""Ends the reading of signals, which have numbers from 1."""


class Stopping(BaseException):
    """All processes stop here, together. No ``Exception``: nothing that handles errors may take it for one."""

    def __init__(self, record: StopRecord) -> None:
        super().__init__(record.sentence)
        self.record = record


class StopRequests:
    """Notes the first request. Outside ``deferred``, where no step can be finished, the process ends at once."""

    def __init__(self, rank: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None
        # When the first signal came, by ``clock``; a stop file sets no limit of time.
        self.signalled_at: float | None = None
        self._installed = False
        self._rank = rank
        self._clock = clock
        self._deferred = False
        self._checked_at = -_POLL_SECONDS
        self._end_now: Callable[[str], None] = lambda reason: None

    def install(self, end_now: Callable[[str], None]) -> None:
        """Take over the signals, in the main thread. ``end_now(reason)`` ends the process outside ``deferred``."""
        self._end_now = end_now
        self._installed = True
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._warn_of(number)

    def _warn_of(self, number: int) -> None:
        self.warn(f"{signal.Signals(number).name} to rank {self._rank}")

    def warn(self, reason: str) -> None:
        """The platform ends this process soon: stop, within the grace time from now on."""
        # A repeated signal does not extend the grace time.
        self.signalled_at = self.signalled_at or self._clock()
        self.ask(reason)

    def ask(self, reason: str) -> None:
        """Stop after the current step, or at once where there are no steps."""
        # The first reason is the cause; later ones often follow from it.
        self.reason = self.reason or reason
        if not self._deferred:
            self._end_now(self.reason)

    def heed(self) -> None:
        """End the process if a request was noted, at the end of ``deferred``."""
        if self.reason is not None and not self._deferred:
            self._end_now(self.reason)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a request is only noted: the training loop stops between two steps."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Inside, processes that this thread starts, or a thread that it starts, do not get the signals.

        torchrun sends them to a worker's whole process group, Slurm to all processes of a step. A compiler that ends
        by one fails the step that was to be finished. Inside ``deferred``, in the main thread.
        """
        if not self._installed:
            yield
            return
        reader, writer = os.pipe()
        # Started before the signals are blocked: the kernel needs a thread to give them to.
        thread = threading.Thread(target=self._note_signals, args=(reader,), name="signals", daemon=True)
        thread.start()
        os.set_blocking(writer, False)
        earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # Blocked in this thread alone. Its children inherit that, while a handler would not survive their exec.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            signal.set_wakeup_fd(earlier)
            # Not by closing the pipe: a process that was forked meanwhile may hold it open.
            os.write(writer, _NO_SIGNAL)
            thread.join()
            os.close(writer)

    def _note_signals(self, reader: int) -> None:
        """Note a signal when it comes: a blocked main thread runs its handler only when what it waits for has ended."""
        with os.fdopen(reader, "rb", buffering=0) as signals:
            while (byte := signals.read(1)) != _NO_SIGNAL:
                if byte[0] in SIGNALS:
                    self._warn_of(byte[0])

    def check_file(self, stop_file: Path) -> None:
        """Take ``stop_file`` for a request if it exists; checks once a second at most."""
        now = self._clock()
        # Steps can take milliseconds, and the folder may be on a network file system.
        if now - self._checked_at < _POLL_SECONDS:
            return
        self._checked_at = now
        if stop_file.exists():
            self.ask("the stop file")

    def seconds_left(self, grace_seconds: float) -> float | None:
        """What is left of the grace time; None if nothing has set one."""
        if self.signalled_at is None:
            return None
        return grace_seconds - (self._clock() - self.signalled_at)


def leave(code: int) -> None:
    """End this process now. Threads that wait for processes which are gone would keep it alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips what Python does at its end, such as joining threads; the streams above are all that it would have flushed.
    os._exit(code)
