"""Owns the node's transfer agent: one process of low priority that moves and checks files for the trainer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from sm_llm.errors import StorageError
from sm_llm.storage.uri import is_s3
from sm_llm.worker.transfer import agent_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.base import Progress, Store

_Result = TypeVar("_Result")
# What a process may need to end beside the time for its uploads.
_EXIT_SECONDS = 1.0


class TransferAgent:
    """Runs functions of ``sm_llm.storage`` that move files, in a process of its own if the store is in S3.

    There, signing, checksums and the engines' threads would take turns with the training loop's Python. Copies to a
    folder mostly wait for the kernel and stay in the calling thread. The process begins with the first call, lives as
    long as this one (it sees the end of its pipe), and finds credentials by AWS's own chain in the same environment.
    """

    def __init__(self) -> None:
        # How long after SIGTERM the process may live; for one that begins later.
        self.grace_seconds = 120.0
        # Whether the owner has to end soon, too.
        self.is_stopping: Callable[[], bool] = lambda: False
        self._calls = threading.Lock()
        # Held while a process starts, so that ``end`` finds it.
        self._starts = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._ended = False

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    def call(
        self,
        function: Callable[..., _Result],
        store: Store,
        *arguments: Any,
        progress: Progress = lambda _: None,
        **named: Any,
    ) -> _Result:
        """``function(store, *arguments, progress=…, **named)``; function, arguments and result can be pickled.

        Raises what the function raises. A process that crashes is started anew, and the work is done again, once:
        what is moved and checked twice is the same. One that ended since the grace time of both is nearly over is not:
        no time is left to break another upload off. Raises ``StorageError`` then, after a second crash and after
        ``end``.
        """
        if not is_s3(store.uri):
            return function(store, *arguments, progress=progress, **named)
        # One request at a time: answers on the pipe carry no number that could assign them.
        with self._calls:
            request = function, (store, *arguments), named
            code: int | None = None
            for _ in range(2):
                if self._ended:
                    break
                try:
                    answer, value = self._ask(request, progress)
                except (EOFError, OSError):
                    # The pipe broke: the process crashed, was killed, or ended by its own timer after SIGTERM.
                    code = self._bury()
                    self._ended = self._ended or (code == agent_process.ENDED and self.is_stopping())
                    continue
                if answer == "failed":
                    # The function's own error: the agent is well, and its caller decides whether to try again.
                    raise value
                return value  # type: ignore[no-any-return]
        reason = "it was asked to end" if self._ended else f"it ended twice with exit code {code}"
        raise StorageError(f"{store.uri}: the transfer agent is gone: {reason}")

    def _ask(self, request: Any, progress: Progress) -> tuple[str, Any]:
        with self._starts:
            if self._ended:
                # ``end`` came while this call waited for the lock. A process started now would be ended by nobody.
                raise EOFError
            connection = self._connection or self._start()
        connection.send(request)
        while True:
            answer, value = connection.recv()
            if answer != "moved":
                return answer, value
            progress(value)

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        # Fixed when the process starts: SIGTERM reaches it from the platform, without any message of ours.
        times = agent_process.working_seconds(self.grace_seconds), agent_process.abort_seconds(self.grace_seconds)
        command = [sys.executable, "-P", "-m", agent_process.__name__, str(theirs.fileno()), *map(str, times)]
        # ``-P`` keeps the working folder off the path; this way the agent finds the packages that this process has
        # found.
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # Closed here once the child has it. Otherwise the end of the child would not end our side of the pipe.
        with theirs:
            self._process = subprocess.Popen(
                command, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, bufsize=0
            )
        # Two descriptors: ``end`` shuts the one while a call may be waiting on the other.
        self._socket, self._connection = ours, Connection(os.dup(ours.fileno()))
        return self._connection

    def _bury(self) -> int | None:
        """After the pipe broke: wait for the process, and forget both."""
        if self._connection is not None and self._socket is not None and self._process is not None:
            self._connection.close()
            self._socket.close()
            self._wait(self._process)
        code = None if self._process is None else self._process.returncode
        self._process = self._connection = self._socket = None
        return code

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(agent_process.abort_seconds(self.grace_seconds) + _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def end(self) -> None:
        """End the process; a call that is waiting for it raises ``StorageError``. Uploads are aborted, within seconds.

        May come from another thread than ``call``.
        """
        # Before the lock: a call that is not yet starting a process finds the mark, one that is finishes first.
        self._ended = True
        with self._starts:
            process, pipe = self._process, self._socket
        if process is None or pipe is None:
            return
        try:
            pipe.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is being buried
        self._wait(process)
