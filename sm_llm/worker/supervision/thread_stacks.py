"""Where every thread of this process is, as text."""

from __future__ import annotations

import sys
import threading
import traceback

_LONGEST = 16_000


def thread_stacks(skip: int | None = None) -> str:
    """All Python stacks, innermost call last, the main thread first; ``skip`` leaves out one thread by its id.

    Works while other threads wait in C code that has released the interpreter.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    # The main thread first: it is the one that stalls, and a long text is cut at its end.
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    parts = [
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in frames
        if ident != skip
    ]
    return "\n".join(parts)[:_LONGEST]
