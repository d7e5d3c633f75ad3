"""Reports why this process fails: to the other processes, in output/failure, in the event log and on stderr."""

from __future__ import annotations

import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from sm_llm.contract.failure import Cause, Failure, cause_of, message_of, needs_traceback
from sm_llm.errors import RunFailed
from sm_llm.runs.events.events import EventWriter
from sm_llm.runs.events.failures import Failed
from sm_llm.storage.files import write_new

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.runtime.key_value_store import KeyValueStore

FAILED = "failed"
"""The note of the first failure of the job."""
WAIT_SECONDS = 1.5
"""How long whoever only lost a peer waits for that peer's own report."""
LINGER_SECONDS = 5.0
"""How long the process that failed first waits for the others to read why."""
_READ_BY = "read/"
_POLL_SECONDS = 0.1
_ROOM_BYTES = 131_072


class ProgramFailed(RunFailed):
    """A user's program ended with a failure. ``log`` holds the last lines of its error output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def failure_of(error: BaseException, process: ProcessInfo, step: int | None = None) -> Failure:
    """The record of an exception in this process."""
    text = "".join(traceback.format_exception(error)) if needs_traceback(error) else ""
    # A traceback of ours would hide the program's own.
    if isinstance(error, ProgramFailed):
        text = error.log
    return Failure(
        cause=cause_of(error),
        message=message_of(error),
        rank=process.rank,
        node=process.node,
        host=socket.gethostname(),
        step=step,
        traceback=text,
    )


def claim(kv_store: KeyValueStore | None, failure: Failure) -> Failure:
    """The first failure of the job: this one, or what another process has reported before. Never raises.

    Whoever has only lost its connection to another process waits a moment for that one to report its cause.
    """
    if kv_store is None:
        return failure
    first = _first(kv_store, failure)
    if failure.rank is not None:
        acknowledge(kv_store, failure.rank)
    return first


def acknowledge(kv_store: KeyValueStore | None, rank: int) -> None:
    """Note that this process has read the first failure. Never raises."""
    if kv_store is not None:
        with suppress(RuntimeError):
            kv_store.put(f"{_READ_BY}{rank}", "")


def _first(kv_store: KeyValueStore, failure: Failure) -> Failure:
    with suppress(RuntimeError, ValueError, TypeError):
        # A lost connection is noticed by all others at once, often before the process that failed has reported why.
        deadline = time.monotonic() + (WAIT_SECONDS if failure.cause.is_consequence else 0)
        while True:
            if (reported := kv_store.get(FAILED)) is not None:
                return Failure.from_json(reported)
            if time.monotonic() >= deadline:
                # Of processes that fail at the same moment one is the first for all.
                return Failure.from_json(kv_store.first(FAILED, failure.to_json()))
            time.sleep(_POLL_SECONDS)
    return failure


def publish(context: WorkerContext, first: Failure) -> None:
    """Write the job's first failure where this node shows it; whoever it happened to puts it into the event log."""
    leave_note(context.container.failure, first)
    if first.rank != context.process.rank and first.cause is not Cause.STALLED:
        return
    with suppress(OSError):  # a full disk has no space for it; stderr has it, too
        # A file of its own: only the leader has an event log, and any rank may fail first.
        log = EventWriter(
            context.run.event_file(context.job.attempt, f"rank{context.process.rank}-failure"), context.job.attempt
        )
        log.write(Failed(first.cause, first.message, first.rank, first.node, first.host, first.step, first.traceback))
        log.close()


def reserve_room(path: Path) -> None:
    """Keep some bytes on the disk of ``output/failure``, so that a full disk can still be reported."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _room_beside(path).write_bytes(b"\0" * _ROOM_BYTES)


def _room_beside(path: Path) -> Path:
    return path.with_name(".room")


def leave_note(path: Path, failure: Failure) -> None:
    """Write ``output/failure`` unless somebody has: another process of the node, or a script that knows better."""
    text = failure.to_text().encode()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Frees the bytes that ``reserve_room`` has kept for this.
        _room_beside(path).unlink(missing_ok=True)
        try:
            # Never replaced: the first report on a node is nearest to the cause.
            write_new(path, text)
        except FileExistsError:
            if path.stat().st_size == 0:  # a disk without space gives a file and takes no bytes
                path.write_bytes(text)


def print_failure(own: Failure, first: Failure) -> None:
    """Write to the log, with the first failure last: what is at the end is read first."""
    with suppress(BrokenPipeError):  # nobody reads it any more
        print(f"rank {own.rank} failed: {own.to_text().rstrip()}", file=sys.stderr)
        if first != own:
            print(f"the first to fail was {first.headline}", file=sys.stderr)
        sys.stderr.flush()


def linger(kv_store: KeyValueStore | None, world_size: int, *, is_cause: bool) -> None:
    """Stay until the other processes have read the first failure: the store goes when the torchrun of node 0 does.

    One that was killed never reads it, so this ends after ``LINGER_SECONDS``. A process that is not the cause leaves
    after ``WAIT_SECONDS``: the launcher ends a node that outlives a failed one by seconds.
    """
    deadline = time.monotonic() + (LINGER_SECONDS if is_cause else WAIT_SECONDS)
    waited_for = set(range(world_size)) if kv_store is not None else set()
    with suppress(RuntimeError):
        while waited_for and time.monotonic() < deadline:
            assert kv_store is not None
            # A store that no longer answers has ended with its torchrun: there is nothing left to wait for.
            waited_for = {rank for rank in waited_for if kv_store.get(f"{_READ_BY}{rank}") is None}
            time.sleep(_POLL_SECONDS if waited_for else 0)
