"""What is stored in S3 of an attempt that runs on this machine, and what is read there: a request to stop."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from sm_llm.runs.events.events import EventWriter, Notice, StopRequested
from sm_llm.runs.replication.periodic_task import PeriodicTask
from sm_llm.runs.stop_request import StopRequest
from sm_llm.terminal import say

if TYPE_CHECKING:
    from sm_llm.runs.run_store import RunStore


def store_tasks(home: RunStore, attempt: int) -> list[PeriodicTask]:
    """Periodic tasks (not yet started) that keep the store of a remote run informed of an attempt; a folder needs none.

    One beats, the other stores events and logs, and looks for a request to stop, which becomes a signal to this
    process. What one of them waits for does not hold up the other: a slow upload is no sign of death.
    """

    def tell(message: str) -> None:
        _record(home, attempt, message)

    uploader = home.uploader(home.root, home.is_original)
    heartbeat = home.heartbeat(attempt, lambda: _superseded(home, attempt))
    if uploader is None or heartbeat is None:
        return []
    requests = StopRequest(home.is_asked_to_stop, attempt, lambda: _stop(home, attempt))
    return [
        PeriodicTask([requests.poll, uploader.ship], tell, last=uploader.ship_all),
        PeriodicTask([heartbeat.beat], tell, what="heartbeats"),
    ]


def _stop(home: RunStore, attempt: int) -> None:
    """Somebody elsewhere has asked: everyone who follows the run sees so in its events."""
    # A full disk must not keep the signal from being sent.
    with suppress(OSError):
        log = EventWriter(home.paths.event_file(attempt, "stop"), attempt)
        log.write(StopRequested(now=False))
        log.close()
    os.kill(os.getpid(), signal.SIGTERM)


def _superseded(home: RunStore, attempt: int) -> None:
    """Another machine took this attempt for dead and started the next: two must not continue."""
    _record(home, attempt, "a later attempt of this run was started elsewhere, so this one ends")
    for number in (signal.SIGTERM, signal.SIGINT):  # together they end it at once
        os.kill(os.getpid(), number)


def _record(home: RunStore, attempt: int, message: str) -> None:
    say(message)
    with suppress(OSError):
        log = EventWriter(home.paths.event_file(attempt, "launcher"), attempt)
        log.write(Notice(message, "warning"))
        log.close()
