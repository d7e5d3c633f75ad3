"""Reads the node logs of a local run: whole, the last lines, or followed while they grow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sm_llm.contract.run_paths import RunPaths

POLL_SECONDS = 0.2


def last_lines(path: Path, count: int, window_bytes: int = 262_144) -> list[str]:
    """At most ``count`` last lines of a file, read from its end; empty where there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - window_bytes))
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    return lines[-count:] if count else []


def read_logs(
    paths: RunPaths,
    attempt: int,
    *,
    still_running: Callable[[], bool],
    tail: int | None = None,
    node: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Lines of all node logs of an attempt, rank 0's node first; then new ones while ``still_running`` says so.

    ``tail`` starts with only the last lines of every node; ``node`` picks one node. With several nodes a line begins
    with ``[node i] ``.
    """
    pattern = "node-*.log" if node is None else f"node-{node}.log"
    logs = sorted(paths.logs(attempt).glob(pattern), key=lambda path: int(path.stem.removeprefix("node-")))
    followers = [_Follower(log, f"[{log.stem.replace('-', ' ')}] " if len(logs) > 1 else "") for log in logs]
    try:
        for follower in followers:
            yield from follower.start(tail)
        alive = True
        while alive:
            alive = still_running()  # asked before reading, so that the last lines are never missed
            for follower in followers:
                yield from follower.new_lines(whole_only=alive)
            if alive:
                sleep(POLL_SECONDS)
    finally:
        for follower in followers:
            follower.close()


class _Follower:
    """Reads one growing file line by line."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._stream: BinaryIO = path.open("rb")
        self._path = path
        self._prefix = prefix

    def start(self, tail: int | None) -> Iterator[str]:
        if tail is not None:
            yield from (self._prefix + line for line in last_lines(self._path, tail))
            self._stream.seek(0, 2)

    def new_lines(self, *, whole_only: bool) -> Iterator[str]:
        while raw := self._stream.readline():
            if whole_only and not raw.endswith(b"\n"):
                self._stream.seek(-len(raw), 1)
                return
            yield self._prefix + raw.decode("utf-8", errors="replace").rstrip("\r\n")

    def close(self) -> None:
        self._stream.close()
