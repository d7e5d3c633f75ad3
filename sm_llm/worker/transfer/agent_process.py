"""The transfer agent's own process: runs functions of storage for a trainer, out of the way of its threads.

``python -m sm_llm.worker.transfer.agent_process DESCRIPTOR WORKING_SECONDS ABORT_SECONDS``, started by
``worker.transfer.transfer_agent``. Requests and answers are pickles between two processes of one user. It imports
neither torch nor the trainer's own script.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

NICENESS = 10
ABORT_SECONDS = 8.0
"""How long an upload that is broken off may take to remove its parts from the store, before this process ends."""
ENDED = 0
"""The exit code of a process that ended because its owner or its time did, and not by a crash."""
_PROGRESS_SECONDS = 0.5


class _Ended(BaseException):
    """The owner is gone, or the time is over: what runs is broken off, and cleans up behind itself."""


def working_seconds(grace_seconds: float) -> float:
    """How long after SIGTERM work may continue: what is left then is for breaking it off."""
    return grace_seconds - abort_seconds(grace_seconds)


def abort_seconds(grace_seconds: float) -> float:
    """How much of the time after SIGTERM is kept for breaking work off."""
    return min(ABORT_SECONDS, grace_seconds / 4)


def main(descriptor: int, working: float, aborting: float) -> None:
    """Answer requests until the owner ends, or until SIGTERM is ``working`` seconds ago.

    A platform's SIGTERM reaches this process, too. It does not stop work by itself: the owner may still want its last
    checkpoint. Whatever has not ended then is broken off, which may take ``aborting`` seconds.
    """
    # Checksums and signatures must not take the cores that the training's own threads need.
    os.nice(NICENESS)
    signal.signal(signal.SIGALRM, lambda *_: _end(aborting))
    signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, working))
    for number in (signal.SIGINT, signal.SIGUSR1):  # the owner decides what these mean
        signal.signal(number, signal.SIG_IGN)
    # The owner blocks it for what it starts while it trains (``StopRequests.shielded``).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    connection = Connection(descriptor)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, requests), daemon=True).start()
    answers = _Answers(connection)
    with suppress(_Ended, OSError):
        for function, arguments, named in iter(requests.get, None):
            answers.send(*_result(function, arguments, named, answers.count))
    os._exit(ENDED)  # threads of a transfer may still wait for the store


def _end(aborting: float) -> None:
    """In the main thread, where transfers run: they take it for an interruption. Comes once."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    # A store that does not answer an abort must not outlast the grace time. Its parts are left to the next start.
    timer = threading.Timer(aborting, os._exit, (ENDED,))
    timer.daemon = True
    timer.start()
    raise _Ended


def _listen(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Pass requests on, and None at the end of the pipe, which is the end of the owner."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        # Python runs signal handlers in the main thread, where the transfers run: only so an exception reaches them.
        os.kill(os.getpid(), signal.SIGALRM)
        # A signal that comes just before the main thread waits for a request is handled only when it wakes up.
        requests.put(None)


def _result(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], count: Any
) -> tuple[str, Any]:
    try:
        return "done", function(*arguments, **named, progress=count)
    # ``_Ended`` is no ``Exception`` and passes: there is nobody left to answer.
    except Exception as error:
        try:
            # Some errors can be pickled but not restored (their constructors take other arguments). Reading such an
            # answer would fail in the owner, as if this process had crashed.
            pickle.loads(pickle.dumps(error))
        except Exception:
            return "failed", StorageError(f"{type(error).__name__}: {error}")
        return "failed", error


class _Answers:
    """What goes back to the owner; bytes moved are added up and reported now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._moved = 0
        self._reported = 0.0

    def send(self, kind: str, value: Any) -> None:
        with self._lock:
            # The last bytes first: after its answer the owner reads no progress of this request any more.
            if self._moved and kind != "moved":
                self._connection.send(("moved", self._moved))
                self._moved = 0
            self._connection.send((kind, value))

    def count(self, increment: int) -> None:
        """Called by the threads of a transfer, which can do nothing about an owner that is gone."""
        with self._lock, suppress(OSError):
            self._moved += increment
            if self._moved and time.monotonic() - self._reported >= _PROGRESS_SECONDS:
                self._reported = time.monotonic()
                self._connection.send(("moved", self._moved))
                self._moved = 0


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
