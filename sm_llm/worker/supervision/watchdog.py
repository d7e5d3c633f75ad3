"""A thread beside the main one: gives signs of life, ends with a failed job, and finds out who stalls it."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from sm_llm.contract.failure import Cause, Failure
from sm_llm.worker.runtime.stop import leave
from sm_llm.worker.supervision import failure_report as failures
from sm_llm.worker.supervision.hang_report import HangReport, RankReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.spec.training import WatchdogSpec
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.runtime.key_value_store import KeyValueStore

POLL_SECONDS = 0.5
OWN_END_SECONDS = 4.0
"""How long the main thread may take to end by itself once the job has failed."""
SILENT_STORE_SECONDS = 12.0
ALARM = "alarm"
_DONE = "done"
# Characters of all stacks of a process in a report.
_LONGEST_STACKS = 16_000


class Watchdog:
    """Runs from the first import to the end of the task, whatever the main thread waits for.

    Processes stand in a ring: each checks whether the next one still gives signs of life. The first that finds a fault
    raises the alarm; then every process that can puts its stacks in the store, and the lowest rank among them
    (``HangReport``) writes to the event log and ends the job. Without a board it watches this process alone.
    """

    def __init__(
        self,
        context: WorkerContext,
        spec: WatchdogSpec,
        kv_store: KeyValueStore | None,
        end: Callable[[int], object] = leave,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._spec = spec
        self._kv_store = kv_store
        self._end = end
        self._clock = clock
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beats = 0
        # Each process watches one other: the load on the store grows with the number of processes, not with its square.
        self._neighbour = (context.process.rank + 1) % context.process.world_size
        # The neighbour's last beat and when it changed, by this process's clock: clocks of hosts are never compared.
        self._last_beat: tuple[str | None, float] = (None, clock())
        self._hang_report: HangReport | None = None
        self._first: Failure | None = None
        self._failed_at = 0.0
        self._answered_at = clock()

    def start(self) -> Watchdog:
        if self._kv_store is not None:
            process = self._context.process
            # With it a hang report on the same host can read the state of a process that does not answer.
            self._kv_store.put(f"process/{process.rank}", json.dumps([socket.gethostname(), os.getpid()]))
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching; the others take this process's silence for what it is."""
        self._closed.set()
        self._thread.join(timeout=2 * POLL_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        if self._kv_store is not None:
            try:
                self._kv_store.put(f"beat/{self._context.process.rank}", _DONE)
            except RuntimeError:  # node 0 has ended already
                return

    def _watch(self) -> None:
        pause = POLL_SECONDS
        while not self._closed.wait(pause):
            try:
                # Sign of life first, so that reading the notes of the others does not make this process seem dead.
                self._beat()
                self._check()
                self._answered_at, pause = self._clock(), POLL_SECONDS
            except RuntimeError as error:  # torch prints a page of its own each time
                self._lose_the_store(error)
                pause = SILENT_STORE_SECONDS / 4

    def _beat(self) -> None:
        if self._spec.enabled:  # prints C stacks, should this very thread be kept from running
            faulthandler.dump_traceback_later(self._spec.stall_seconds, exit=False)
        self._beats += 1
        # Not once the job has failed: the store may be gone by then.
        if self._kv_store is not None and self._first is None:
            self._kv_store.put(f"beat/{self._context.process.rank}", str(self._beats))

    def _check(self) -> None:
        if (
            self._first is None
            and self._kv_store is not None
            and (reported := self._kv_store.get(failures.FAILED)) is not None
        ):
            # Kept: the store ends with its torchrun, and cannot be asked a second time.
            self._first, self._failed_at = Failure.from_json(reported), self._clock()
        if self._first is not None:  # the store may go now
            self._end_with(self._first)
        elif self._hang_report is not None:
            if (outcome := self._hang_report.outcome()) is not None:
                self._end_at_once(failures.claim(self._kv_store, outcome))
        elif (alarm := self._alarm()) is not None:
            self._answer(alarm)

    def _alarm(self) -> dict[str, Any] | None:
        """An alarm that another process, or this one, raises."""
        reported = self._kv_store.get(ALARM) if self._kv_store is not None else None
        if reported is not None:
            return dict(json.loads(reported))
        own = (self._own_stall() or self._silent_neighbour()) if self._spec.enabled else None
        if own is None or self._kv_store is None:
            return own
        # Of several alarms one counts: all processes answer the same.
        return dict(json.loads(self._kv_store.first(ALARM, json.dumps(own))))

    def _own_stall(self) -> dict[str, Any] | None:
        marker = self._context.marker
        seconds, median = marker.seconds_without_step(), marker.median_seconds
        if seconds is None:
            return None
        # Until a few steps are measured nothing is known of their duration: the first ones compile and warm up.
        usual = self._spec.start_seconds if median is None else self._spec.stall_factor * median
        if seconds <= max(usual, self._spec.stall_seconds):
            return None
        return {"seconds": seconds, "median": median, "silent": None}

    def _silent_neighbour(self) -> dict[str, Any] | None:
        if self._kv_store is None or self._neighbour == self._context.process.rank:
            return None
        beat, now = self._kv_store.get(f"beat/{self._neighbour}"), self._clock()
        if beat != self._last_beat[0]:
            self._last_beat = (beat, now)
        silence = now - self._last_beat[1]
        # A neighbour without any beat has not started yet, and gets the time of a start.
        limit = self._spec.start_seconds if beat is None else self._spec.stall_seconds
        if beat == _DONE or silence <= limit:
            return None
        return {"seconds": silence, "median": self._context.marker.median_seconds, "silent": self._neighbour}

    def _answer(self, alarm: dict[str, Any]) -> None:
        marker = self._context.marker
        # Stacks are taken at once, while everybody still is where the stall began.
        answer = RankReport(
            self._context.process.rank, marker.step, marker.phase, thread_stacks(skip=threading.get_ident())
        )
        self._hang_report = HangReport(self._context, self._kv_store, alarm, answer, self._clock)
        self._hang_report.answer()

    def _end_with(self, first: Failure) -> None:
        """The job has failed. The main thread may come to its own end; if it waits for ever, it ends here."""
        if first.rank == self._context.process.rank and self._hang_report is None:
            return  # the main thread has reported it and is on its way out
        if self._clock() - self._failed_at > OWN_END_SECONDS:
            self._end_at_once(first)

    def _end_at_once(self, first: Failure) -> None:
        failures.publish(self._context, first)
        print(f"rank {self._context.process.rank} ends: the first to fail was {first.headline}", flush=True)
        failures.acknowledge(self._kv_store, self._context.process.rank)
        # Others may still read the store, which ends with the torchrun of node 0.
        failures.linger(self._kv_store, self._context.process.world_size, is_cause=False)
        self._end(1)

    def _lose_the_store(self, error: RuntimeError) -> None:
        """torchrun's store does not answer: node 0 has failed, or is out of reach."""
        if self._closed.is_set() or self._clock() - self._answered_at < SILENT_STORE_SECONDS:
            return
        process = self._context.process
        message = f"another process is gone: torchrun's store on node 0 does not answer ({error})"
        # Only on this node: nothing can be agreed on without the store.
        failures.leave_note(
            self._context.container.failure,
            Failure(
                Cause.LOST_PEER, message, process.rank, process.node, socket.gethostname(), self._context.marker.step
            ),
        )
        self._end(1)


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
    return "\n".join(parts)[:_LONGEST_STACKS]
