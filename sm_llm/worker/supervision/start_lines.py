"""A line every ten seconds until the first step is done: what the start is at."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.worker.context import WorkerContext

SECONDS = 10.0


@contextmanager
def start_lines(context: WorkerContext, seconds: float = SECONDS) -> Iterator[None]:
    """Inside, print the phase of the start every so many ``seconds`` on the leader, until a step is done."""
    if not context.process.is_leader:
        yield
        return
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(seconds) and not context.marker.has_stepped:
            phases = context.start_phases
            context.log(f"still {phases.doing}, {phases.seconds:.0f} s after the start")

    thread = threading.Thread(target=report, name="start-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
