"""A line every few seconds until the first step, and none from then on."""

from __future__ import annotations

import threading
from typing import Any

from sm_llm.worker.context import WorkerContext
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.runtime.progress_marker import ProgressMarker
from sm_llm.worker.runtime.start_phases import StartPhases
from sm_llm.worker.supervision.start_lines import start_lines


class Context(WorkerContext):
    """A context that keeps its log lines."""

    def __init__(self, rank: int = 0) -> None:
        self.process, self.marker = ProcessInfo(rank=rank, world_size=2), ProgressMarker()
        self.start_phases = StartPhases()
        self.lines: list[str] = []
        self.logged = threading.Event()

    def log(self, message: str) -> None:
        self.lines.append(message)
        self.logged.set()


def test_lines_say_what_the_start_is_at_until_a_step_is_done() -> None:
    context: Any = Context()
    context.start_phases.enter("drawing the initial weights")
    with start_lines(context, 0.01):
        assert context.logged.wait(60)
        context.start_phases.enter("computing the first step")
        context.logged.clear()
        assert context.logged.wait(60)
        context.marker.begin(0)
        context.marker.done(1)
        threads = [it for it in threading.enumerate() if it.name == "start-lines"]
        for thread in threads:
            thread.join(60)
        count = len(context.lines)
    assert "still drawing the initial weights, " in context.lines[0]
    assert any("still computing the first step, " in it for it in context.lines)
    assert count == len(context.lines)


def test_other_processes_say_nothing() -> None:
    before = set(threading.enumerate())  # with those of trainings that other tests broke off in this process
    with start_lines(Context(rank=1), 0.01):
        assert not [it for it in set(threading.enumerate()) - before if it.name == "start-lines"]
