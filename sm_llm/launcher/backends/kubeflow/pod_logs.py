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
_TIME = re.compile(
    rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?(Z|[+-][0-9]{2}:[0-9]{2}) "
)
# How a node's answer begins that has no log of a container any more.
_REMOVED = b"unable to retrieve container logs"
_SHOWN_BYTES = 60
# Beside a copy: how far it has come, and who writes it.
_SEEN, _LOCK = ".seen-", ".lock-"
# The API server's answer for a container without a log yet, and for a pod that is gone.
_NOT_STARTED = (400, 404)
# An answer that breaks off, or lines that another process has copied in the meantime.
_TRIES = 4
_JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class _Position:
    """How far the log of a pod was copied: the newest time, and how many lines have just that.

    A pod's containers follow one another on one node, so a time leads on from one start to the next. The ids of
    containers would not: what the API server states of a pod is older than what its node answers.
    """

    pod: str = ""
    """Its uid: another pod of the name may be on a node with another clock."""
    second: str = ""
    """Of RFC 3339 with its zone, as the API takes it; empty before the first line."""
    fraction: str = ""
    """Nine digits."""
    lines: int = 0

    @property
    def time(self) -> tuple[str, str]:
        return self.second, self.fraction

    @classmethod
    def read(cls, path: Path) -> _Position:
        try:
            pod, second, fraction, lines = path.read_text(encoding="utf-8").split("\n")
            return cls(pod, second, fraction, int(lines)) if _TIME.match(f"{second} ".encode()) else cls()
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        with open(path, "w", encoding="utf-8", opener=opener) as stream:
            stream.write(f"{self.pod}\n{self.second}\n{self.fraction}\n{self.lines}")

    def behind(self, lines: list[bytes]) -> _Position:
        found = self
        for line in lines:
            if (time := _time(line)) > found.time:
                found = _Position(self.pod, *time, 1)
            elif time == found.time:
                found = replace(found, lines=found.lines + 1)
            # Else a clock was set back, and an answer that begins with the newest second leaves the line out.
        return found


@dataclass
class _NodeLog:
    """``node-<i>.log``, which several processes may add to."""

    folder: Path
    node: int
    pod: Mapping[str, Any]
    held: _Position = field(init=False)
    """Of this pod."""
    _stated: _Position = field(init=False)
    """As its file states it, which may be another pod's."""

    def __post_init__(self) -> None:
        self._stated = _Position.read(self._seen)
        uid = str(self.pod["metadata"].get("uid"))
        self.held = self._stated if self._stated.pod == uid else _Position(uid)

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def _seen(self) -> Path:
        return self.folder / f"{_SEEN}{self.node}"

    def append(self, lines: list[bytes]) -> bool:
        """Add lines with their times; False, and nothing is added, where others have copied further in the meantime."""
        position = self.held.behind(lines)
        with open(self.folder / f"{_LOCK}{self.node}", "w", opener=opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _Position.read(self._seen) != self._stated:
                return False
            with open(self.folder / f"node-{self.node}.log", "ab", opener=opener) as log:
                log.writelines(line.partition(b" ")[2] for line in lines)
            position.write(self._seen)
        self.held = self._stated = position
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
                self._begin_stream(pod, node, instance)

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
        has_ended = bool((container.get("state") or {}).get("terminated"))
        for left in range(_TRIES - 1, -1, -1):
            copy = _NodeLog(self.folder, node, pod)
            try:
                # Of a log that is copied from its begin, the start before this one belongs to it, too.
                is_first = not copy.held.second and (container.get("lastState") or {}).get("terminated")
                if is_first and not self._copy_previous(copy):
                    continue
                log = self._open(copy)
                if log is None or self._copy(copy, log, has_ended=has_ended):
                    return
            except QueryError:
                # What came of the answer is copied, and the next one continues behind it.
                if not left:
                    raise

    def _open(self, copy: _NodeLog, *, previous: bool = False, follow: bool = False) -> PodLog | None:
        """The log of a container from the newest second of its copy on; None where it has none."""
        since = copy.held.second or None
        try:
            return self.cluster.log(self.namespace, copy.name, CONTAINER, since, previous=previous, follow=follow)
        except Refused as error:
            if error.status in _NOT_STARTED:
                return None
            raise

    def _begin_stream(self, pod: Mapping[str, Any], node: int, instance: str) -> None:
        copy = _NodeLog(self.folder, node, pod)
        log = self._open(copy, follow=True)
        if log is None:
            return

        def run() -> None:
            # Whatever ends it, the next ``follow`` asks again, and reports an error that stays.
            with suppress(SubmitError):
                self._copy(copy, log, has_ended=False)

        self._streams[node] = _Stream(instance, log, threading.Thread(target=run, daemon=True))
        self._streams[node].thread.start()

    def _copy(self, copy: _NodeLog, log: PodLog, *, has_ended: bool) -> bool:
        """Append what is new of an answer, as it comes; False where others have copied further in the meantime."""
        known = _Known(copy.held)
        for lines in _batches(log, copy.name, has_ended=has_ended):
            new = [it for it in lines if not known.has(it)]
            # Without the newest line that is copied it is the log of a later start: the end of the other comes first.
            if new and known.is_lacking and not self._copy_previous(copy):
                return False
            known.is_lacking &= not new
            if new and not copy.append(new):
                return False
        return not known.is_lacking or self._copy_previous(copy)

    def _copy_previous(self, copy: _NodeLog) -> bool:
        """Append what is new of the start before the newest, whose last lines state why it has ended."""
        log = self._open(copy, previous=True)
        if log is None:
            return True
        known = _Known(copy.held)
        new = ([it for it in lines if not known.has(it)] for lines in _batches(log, copy.name, has_ended=True))
        return all(copy.append(it) for it in new if it)


class _Known:
    """Which lines of an answer are copied already: those up to the newest time, at its begin."""

    def __init__(self, held: _Position) -> None:
        self._held, self._left = held, held.lines
        self.is_lacking = bool(held.second)
        """Whether the newest line that is copied has not come."""

    def has(self, line: bytes) -> bool:
        if self._held.second and (time := _time(line)) <= self._held.time:
            if time < self._held.time:
                return True
            self.is_lacking = False
            self._left -= 1
            if self._left >= 0:
                return True
        # The rest is new, whatever its time: a clock may be set back.
        self._held = _Position()
        return False


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


def _time(line: bytes) -> tuple[str, str]:
    """Second, and nine digits of its fraction."""
    match = _TIME.match(line)
    assert match is not None
    return (match[1] + match[3]).decode(), (match[2] or b"").ljust(9, b"0").decode()
