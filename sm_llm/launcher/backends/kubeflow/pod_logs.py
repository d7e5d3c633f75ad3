"""A copy of the logs of a job's pods in the run's folder on this machine, continued over restarts."""

from __future__ import annotations

import fcntl
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sm_llm.errors import QueryError, SubmitError
from sm_llm.launcher.backends.kubeflow.cluster import Refused
from sm_llm.launcher.backends.kubeflow.names import CONTAINER
from sm_llm.launcher.backends.kubeflow.states import node_of
from sm_llm.owned import make_folders, opener

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster, PodLog

MOST_STREAMS = 8
"""Pods whose lines are copied as they are printed, rank 0's first. Each holds a connection to the API server, which
bounds them; the other pods are asked again and again."""
# Before each line. The API takes whole seconds in sinceTime, and sends fractions of them.
_TIME = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2}) ")
# How a node's answer begins that has no log of a container any more.
_REMOVED = b"unable to retrieve container logs"
_SHOWN_BYTES = 60
# Beside a copy: which part of which container's log it holds already, and who writes it.
_SEEN, _LOCK = ".seen-", ".lock-"
# The API server's answer for a container without a log yet, and for a pod that is gone.
_NOT_STARTED = (400, 404)
# An answer that breaks off, or lines that another process has copied in the meantime.
_TRIES = 4
_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class _Position:
    """How far the log of one start of a container was copied: its newest second, and how many lines of that second.

    The second is one of RFC 3339 with its zone, as the API takes it.
    """

    instance: str = ""
    second: str = ""
    lines: int = 0

    @classmethod
    def read(cls, path: Path) -> _Position:
        try:
            instance, second, lines = path.read_text(encoding="utf-8").split("\n")
            return cls(instance, second, int(lines)) if not second or _TIME.match(f"{second} ".encode()) else cls()
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        with open(path, "w", encoding="utf-8", opener=opener) as stream:
            stream.write(f"{self.instance}\n{self.second}\n{self.lines}")

    def behind(self, lines: list[bytes]) -> _Position:
        found = self
        for line in lines:
            if (second := _second(line)) > found.second:
                found = replace(found, second=second, lines=1)
            elif second == found.second:
                found = replace(found, lines=found.lines + 1)
            # Else a clock was set back, and an answer that begins with the newest second leaves the line out.
        return found


@dataclass
class _NodeLog:
    """``node-<i>.log``, which several processes may add to."""

    folder: Path
    node: int
    held: _Position = field(init=False)
    """As its file states it."""

    def __post_init__(self) -> None:
        self.held = _Position.read(self._seen)

    @property
    def _seen(self) -> Path:
        return self.folder / f"{_SEEN}{self.node}"

    def append(self, lines: list[bytes], position: _Position) -> bool:
        """Add lines with their times; False, and nothing is added, where others have copied further in the meantime."""
        with open(self.folder / f"{_LOCK}{self.node}", "w", opener=opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _Position.read(self._seen) != self.held:
                return False
            with open(self.folder / f"node-{self.node}.log", "ab", opener=opener) as log:
                log.writelines(line.partition(b" ")[2] for line in lines)
            position.write(self._seen)
        self.held = position
        return True


@dataclass
class _Stream:
    """A thread that copies what a container prints, as it prints it, until it ends."""

    instance: str
    log: PodLog
    thread: threading.Thread

    def close(self) -> None:
        self.log.close()
        self.thread.join(_JOIN_SECONDS)


@dataclass
class PodLogCopy:
    """The logs of one attempt: ``node-<i>.log`` in ``folder`` for pod i."""

    cluster: KubernetesCluster
    namespace: str
    job: str
    folder: Path
    node: int | None = None
    """Only this node's."""
    _streams: dict[int, _Stream] = field(default_factory=dict)

    def pull(self) -> None:
        """Append what is new. Raises ``QueryError``."""
        self.close()
        for node, pod in self._pods():
            self._pull_pod(pod, node)

    def follow(self) -> None:
        """Append what is new, and from then on what containers print, until ``close``. Raises ``QueryError``."""
        for index, (node, pod) in enumerate(self._pods()):
            instance = str((_container(pod) or {}).get("containerID"))
            if (stream := self._streams.get(node)) is not None:
                if stream.thread.is_alive() and stream.instance == instance:
                    continue
                # It has ended with its container, or hangs at one that is gone.
                self._streams.pop(node).close()
            self._pull_pod(pod, node)
            if index < MOST_STREAMS and _is_running(pod):
                self._begin_stream(str(pod["metadata"]["name"]), node, instance)

    def close(self) -> None:
        """End what ``follow`` has begun."""
        while self._streams:
            _, stream = self._streams.popitem()
            stream.close()

    def _pods(self) -> list[tuple[int, Mapping[str, Any]]]:
        make_folders(self.folder)
        found = ((node_of(it), it) for it in self.cluster.pods(self.namespace, self.job))
        wanted = [(node, pod) for node, pod in found if node is not None and self.node in (None, node)]
        return sorted(wanted, key=lambda it: it[0])

    def _pull_pod(self, pod: Mapping[str, Any], node: int) -> None:
        container = _container(pod)
        # A container that is about to be started again still has the log of its last start.
        if container is None or not container.get("containerID"):
            return
        name, instance = str(pod["metadata"]["name"]), str(container["containerID"])
        held = _NodeLog(self.folder, node).held
        ended = (container.get("lastState") or {}).get("terminated") or {}
        # The node keeps the log of the start before this one, whose last lines state why it has ended.
        if held.instance != instance and (before := str(ended.get("containerID") or "")):
            self._pull_start(name, node, before, has_ended=True, previous=True)
        has_ended = bool((container.get("state") or {}).get("terminated"))
        self._pull_start(name, node, instance, has_ended=has_ended)

    def _pull_start(self, pod: str, node: int, instance: str, *, has_ended: bool, previous: bool = False) -> None:
        """Append what is new of one start of a container."""
        for left in range(_TRIES - 1, -1, -1):
            copy = _NodeLog(self.folder, node)
            log = self._open(pod, copy, instance, previous=previous)
            try:
                if log is None or _copied(copy, instance, log, pod, has_ended=has_ended):
                    return
            except QueryError:
                # What came of the answer is copied, and the next one continues behind it.
                if not left:
                    raise

    def _open(
        self, pod: str, copy: _NodeLog, instance: str, *, previous: bool = False, follow: bool = False
    ) -> PodLog | None:
        """The log of a container from where its copy ends; None where it has none."""
        since = copy.held.second if copy.held.instance == instance else ""
        try:
            return self.cluster.log(self.namespace, pod, CONTAINER, since or None, previous=previous, follow=follow)
        except Refused as error:
            if error.status in _NOT_STARTED:
                return None
            raise

    def _begin_stream(self, pod: str, node: int, instance: str) -> None:
        copy = _NodeLog(self.folder, node)
        log = self._open(pod, copy, instance, follow=True)
        if log is None:
            return

        def run() -> None:
            # Whatever ends it, the next ``follow`` asks again, and reports an error that stays.
            with suppress(SubmitError):
                _copied(copy, instance, log, pod, has_ended=False)

        self._streams[node] = _Stream(instance, log, threading.Thread(target=run, daemon=True))
        self._streams[node].thread.start()


def _copied(copy: _NodeLog, instance: str, log: PodLog, pod: str, *, has_ended: bool) -> bool:
    """Append what is new of an answer, as it comes; False where others have copied further in the meantime."""
    position = copy.held if copy.held.instance == instance else _Position(instance)
    # The answer begins with the second that was copied last, and holds the lines of it that are known.
    second, known = position.second, position.lines
    for lines in _batches(log, pod, has_ended=has_ended):
        new = []
        for line in lines:
            if known and _second(line) == second:
                known -= 1
            else:
                known = 0
                new.append(line)
        if new:
            position = position.behind(new)
            if not copy.append(new, position):
                return False
    return True


def _batches(log: PodLog, pod: str, *, has_ended: bool) -> Iterator[list[bytes]]:
    """Whole lines of a log, each with its time in front. Raises ``QueryError`` for an answer that is no log."""
    rest, is_log = b"", False
    for chunk in log:
        # By line feeds alone: a progress bar returns to the begin of its line.
        *whole, rest = (rest + chunk).split(b"\n")
        if whole and not is_log:
            if not _begins_log(whole[0], pod):
                return
            is_log = True
        if lines := [it + b"\n" for it in whole if _TIME.match(it)]:
            yield lines
    # What has no line feed is half of a line, which comes whole with the next answer, if there is one.
    if rest and (is_log or _begins_log(rest, pod)) and has_ended and _TIME.match(rest):
        yield [rest + b"\n"]


def _begins_log(line: bytes, pod: str) -> bool:
    if _TIME.match(line):
        return True
    # The node's own words in place of a log that it has removed.
    if line.startswith(_REMOVED):
        return False
    begin = line[:_SHOWN_BYTES].decode("utf-8", "replace")
    raise QueryError(f"the log of pod {pod} has no times in front of its lines; it begins with {begin!r}")


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return next((it for it in statuses if it.get("name") == CONTAINER), None)


def _is_running(pod: Mapping[str, Any]) -> bool:
    return (((_container(pod) or {}).get("state")) or {}).get("running") is not None


def _second(line: bytes) -> str:
    match = _TIME.match(line)
    assert match is not None
    return (match[1] + match[2]).decode()
