"""Reads the logs of a run that lie here: whole, the last lines, or followed while they grow."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, BinaryIO

from sm_llm.errors import QueryError, StorageError
from sm_llm.launcher.log_filter import LogFilter
from sm_llm.launcher.observe.retry_policy import RetryPolicy
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_store import RunStore

POLL_SECONDS = 0.2
COPY_SECONDS = 2.0
"""Between two copies of the logs of a job that runs elsewhere."""
_BLOCK_BYTES = 65_536
JOB_LOG = "job.log"
"""What the scheduler and a job's own script print, where both exist, beside the nodes' logs."""
_NODE_LOG = re.compile(r"node-[0-9]{1,6}\.log")


def last_lines(path: Path, count: int) -> list[str]:
    """At most ``count`` last lines of a file, read from its end; empty if it does not exist."""
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        return _last_lines(stream, stream.seek(0, 2), count, LogFilter())


def _last_lines(stream: BinaryIO, end: int, count: int, wanted: LogFilter) -> list[str]:
    """The last ``count`` wanted lines before byte ``end``, read backwards in blocks until there are enough."""
    found: list[str] = []
    rest, begin = b"", end
    while begin > 0 and len(found) < count:
        begin, before = max(0, begin - _BLOCK_BYTES), begin
        stream.seek(begin)
        lines = (stream.read(before - begin) + rest).splitlines(keepends=True)
        # The first line may continue in the block before it.
        rest = lines.pop(0) if begin > 0 else b""
        shown = (wanted.text(line) for line in lines)
        found = [*(line for line in shown if line is not None), *found]
    return found[-count:] if count else []


def _end_of_whole_lines(stream: BinaryIO) -> int:
    size = stream.seek(0, 2)
    begin = stream.seek(max(0, size - _BLOCK_BYTES))
    newline = stream.read().rfind(b"\n")
    # Without a line end in the last block the file is one very long line, which counts as whole.
    return size if newline < 0 else begin + newline + 1


def fresh_logs(
    run_store: RunStore, attempt: int, still_running: Callable[[], bool], wanted: LogFilter | None = None
) -> Iterator[str]:
    """``read_logs`` of a run that may be kept, or run, elsewhere."""

    retries = RetryPolicy(run_store)
    was_alive = False

    def check() -> bool:
        nonlocal was_alive
        try:
            alive = still_running()  # asked before the rest, so that the last lines are never missed
            run_store.refresh(f"logs/attempt-{attempt}/")
        except StorageError as issue:
            if not was_alive:  # nobody follows yet
                raise
            retries.bear(issue)
            return True
        retries.settle()
        was_alive = alive
        return alive

    return read_logs(run_store.paths, attempt, wanted, still_running=check, poll=run_store.poll_seconds)


def copied_logs(
    paths: RunPaths, attempt: int, wanted: LogFilter, pull: Callable[[], bool], still_running: Callable[[], bool]
) -> Iterator[str]:
    """``read_logs`` of a job elsewhere, whose logs ``pull`` copies here; it returns whether more may be there.

    A platform that does not answer (``QueryError``) is reported once, and asked again.
    """
    has_failed, next_copy = False, 0.0

    def check() -> bool:
        nonlocal has_failed, next_copy
        if time.monotonic() < next_copy:
            return True  # what a copy has begun may add lines in between
        next_copy = time.monotonic() + COPY_SECONDS
        try:
            alive = still_running()  # asked before the rest, so that the last lines are never missed
            while pull():  # one answer brings a bounded part of each log
                pass
        except QueryError as error:
            if not has_failed:
                echo(f"{error}. The job continues; asking again", err=True)
            has_failed = True
            # Until it answers again the job is taken for alive.
            return True
        has_failed = False
        return alive

    return read_logs(paths, attempt, wanted, still_running=check)


def read_logs(
    paths: RunPaths,
    attempt: int,
    wanted: LogFilter | None = None,
    *,
    still_running: Callable[[], bool],
    poll: float = POLL_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Wanted lines of the logs of an attempt, rank 0's node first; then new ones while ``still_running``.

    With several nodes a line begins with ``[node i] ``; one of the scheduler or of the job's script begins with
    ``[job] ``. A log that appears later is read from then on.
    """
    followers: dict[Path, _Follower] = {}
    wanted = wanted or LogFilter()
    alive = True
    try:
        while alive:
            alive = still_running()  # asked before reading, so that the last lines are never missed
            for follower in _followers(paths, attempt, wanted, followers):
                yield from follower.new_lines(whole_only=alive)
            if alive:
                sleep(poll)
    finally:
        for follower in followers.values():
            follower.close()


def _followers(paths: RunPaths, attempt: int, wanted: LogFilter, known: dict[Path, _Follower]) -> list[_Follower]:
    for log in paths.logs(attempt).glob("*.log" if wanted.node is None else f"node-{wanted.node}.log"):
        if log not in known and (log.name == JOB_LOG or _NODE_LOG.fullmatch(log.name)) and log.is_file():
            known[log] = _Follower(log, wanted)
    # By number: node 10 comes after node 2.
    nodes = sorted((it for it in known if it.name != JOB_LOG), key=_node)
    has_labels = wanted.labels or len(nodes) > 1
    for log in nodes:
        known[log].label = f"[node {_node(log)}] " if has_labels else ""
    of_job = [it for it in known if it.name == JOB_LOG]
    for log in of_job:
        known[log].label = "[job] "
    return [known[log] for log in (*nodes, *of_job)]


def _node(log: Path) -> int:
    return int(log.stem.removeprefix("node-"))


class _Follower:
    """Reads one growing file line by line."""

    def __init__(self, path: Path, wanted: LogFilter) -> None:
        self.path = path
        self.label = ""
        self._wanted = wanted
        self._stream: BinaryIO = path.open("rb")
        self._has_begun = wanted.tail is None

    def new_lines(self, *, whole_only: bool) -> Iterator[str]:
        if not self._has_begun:
            yield from self._begin()
        while raw := self._stream.readline():
            if whole_only and not raw.endswith(b"\n"):
                # The line is still being written: the next round reads it again, whole.
                self._stream.seek(-len(raw), 1)
                return
            if (line := self._wanted.text(raw)) is not None:
                yield self.label + line

    def _begin(self) -> Iterator[str]:
        """The last lines; what follows them, a line that is being written included, is left for later."""
        self._has_begun = True
        end = _end_of_whole_lines(self._stream)
        lines = _last_lines(self._stream, end, self._wanted.tail or 0, self._wanted)
        self._stream.seek(end)
        yield from (self.label + line for line in lines)

    def close(self) -> None:
        self._stream.close()
