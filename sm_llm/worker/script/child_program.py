"""A program as a child process: its output passed on, stopped as a whole, and its last words kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TextIO

from sm_llm.contract.failure import last_error_line
from sm_llm.errors import RunFailed
from sm_llm.owned import UMASK_ENVIRONMENT
from sm_llm.parent import end_with_parent
from sm_llm.worker.supervision.failure_report import ProgramFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import IO

_KEPT_LINES = 200
_DRAIN_SECONDS = 5.0


class Program:
    """One child process in a session of its own, so that a signal reaches all that it starts."""

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``on_line`` is called with every line that it prints, from two threads."""
        self._argv = list(argv)
        self._on_line = on_line
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        try:
            self._process = subprocess.Popen(
                self._argv,
                env=dict(environ),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                umask=int(environ.get(UMASK_ENVIRONMENT, "-1"), 8),  # its files elsewhere are as open as its user's
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        except OSError as error:
            raise RunFailed(f"{argv[0]} cannot be started in {folder}: {error}") from error
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._copiers = [
            threading.Thread(target=self._copy, args=(self._process.stdout, sys.stdout, None), daemon=True),
            threading.Thread(target=self._copy, args=(self._process.stderr, sys.stderr, self._last), daemon=True),
        ]
        for copier in self._copiers:
            # Pipes that nobody reads fill up, and the program would block in a print.
            copier.start()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM to all of it, SIGKILL to what is left after ``grace_seconds``; returns when it has ended."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        # Even if the program has ended: what it started may have survived it, in the same session.
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all of it."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def wait(self) -> int:
        """Wait for its end and the rest of its output; returns the exit code."""
        code = self._process.wait()
        for copier in self._copiers:
            copier.join(_DRAIN_SECONDS)  # a grandchild may hold the pipe for ever
        return code

    def check(self) -> None:
        """Raise ``ProgramFailed``, with its own last error, if it ended otherwise than with exit code 0."""
        code = self.wait()
        if code == 0:
            return
        how = f"exit code {code}" if code > 0 else f"signal {-code} ({_signal_name(-code)})"
        lines = list(self._last)
        found = last_error_line([line.strip() for line in lines])
        words = found[0] if found else next((line.strip() for line in reversed(lines) if line.strip()), "")
        # After the interpreter comes a file, or ``-m`` and a module.
        name = self._argv[2] if self._argv[1:2] == ["-m"] else self._argv[1]
        raise ProgramFailed(
            f"{words} ({name} ended with {how})" if words else f"{name} ended with {how}", "".join(lines)
        )

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            # The group's id is that of its first process, which stays valid while any member lives.
            os.killpg(self._process.pid, number)

    def _copy(self, source: IO[bytes], target: TextIO, keep: deque[str] | None) -> None:
        for raw in source:
            text = raw.decode("utf-8", "replace")
            self._on_line(text)
            if keep is not None:
                keep.append(text)
            # Our own output may be closed; the pipe is read to its end all the same, for the program's sake.
            with contextlib.suppress(OSError, ValueError):
                target.write(text)
                target.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
