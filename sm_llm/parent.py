"""Ties a process to its parent, for children that are in sessions of their own, where nothing else does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here: a child of a process with threads must not load anything between fork and exec.
_LIBRARY = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends ``number`` to this process when the thread that started it ends (Linux only).

    ``parent`` is the process id that is known to be the parent's; one that has ended already takes this process along.
    """
    if _LIBRARY is None:
        return
    expected = os.getppid() if parent is None else parent
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    # The parent ended before ``prctl`` took effect, so the kernel will send nothing. ``_exit``: between fork and exec,
    # exit handlers and buffers are the parent's.
    if os.getppid() != expected:
        os._exit(1)
