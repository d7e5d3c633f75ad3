"""What is stored in S3 of an attempt that runs on this machine, and what is read there: a request to stop."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from sm_llm.runs.events.events import EventWriter, Notice, StopRequested
from sm_llm.runs.replication.periodic_task import PeriodicTask
from sm_llm.runs.stop_request import StopRequest
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from sm_llm.runs.run_store import RunStore


def store_tasks(run_store: RunStore, attempt: int) -> list[PeriodicTask]:
    """Periodic tasks (not yet started) that keep the store of a remote run informed of an attempt; a folder needs none.

    One beats, the other stores events and logs, and looks for a request to stop, which becomes a signal to this
    process. What one of them waits for does not hold up the other: a slow upload is no sign of death.
    """

    def report(message: str) -> None:
        _record(run_store, attempt, message)

    uploader = run_store.uploader(run_store.root, run_store.is_original)
    heartbeat = run_store.heartbeat(attempt, lambda: _superseded(run_store, attempt))
    if uploader is None or heartbeat is None:
        return []
    requests = StopRequest(run_store.is_asked_to_stop, attempt, lambda: _stop(run_store, attempt))
    return [
        PeriodicTask([requests.poll, uploader.upload], report, last=uploader.upload_all),
        PeriodicTask([heartbeat.beat], report, what="heartbeats"),
    ]


def _stop(run_store: RunStore, attempt: int) -> None:
    """Somebody elsewhere has asked: everyone who follows the run sees so in its events."""
    # A full disk must not keep the signal from being sent.
    with suppress(OSError):
        log = EventWriter(run_store.paths.event_file(attempt, "stop"), attempt)
        log.write(StopRequested(now=False))
        log.close()
    os.kill(os.getpid(), signal.SIGTERM)


def _superseded(run_store: RunStore, attempt: int) -> None:
    """Another machine took this attempt for dead and started the next: two must not continue."""
    _record(run_store, attempt, "a later attempt of this run was started elsewhere, so this one ends")
    for number in (signal.SIGTERM, signal.SIGINT):  # together they end it at once
        os.kill(os.getpid(), number)


def _record(run_store: RunStore, attempt: int, message: str) -> None:
    echo(message)
    with suppress(OSError):
        log = EventWriter(run_store.paths.event_file(attempt, "launcher"), attempt)
        log.write(Notice(message, "warning"))
        log.close()
