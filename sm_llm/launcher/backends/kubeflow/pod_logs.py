"""A copy of the logs of a job's pods in the run's folder on this machine, continued over restarts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import QueryError
from sm_llm.launcher.backends.kubeflow.cluster import Refused
from sm_llm.launcher.backends.kubeflow.names import CONTAINER
from sm_llm.launcher.backends.kubeflow.states import node_of
from sm_llm.owned import make_folders, opener

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster

# Of one answer; the rest of a long log comes with the next.
MOST_BYTES = 4 << 20
"""Of one pod in one answer; the rest comes with the next."""
# Before each line. The API takes whole seconds in sinceTime, and sends fractions of them.
_TIME = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2}) ")
# How a node's answer begins that has no log of a container any more.
_REMOVED = b"unable to retrieve container logs"
_SHOWN_BYTES = 60
# Beside a copy: which part of which container's log it holds already.
_SEEN = ".seen-"
# The API server's answer for a container without a log yet, and for a pod that is gone.
_NOT_STARTED = (400, 404)


@dataclass
class _Position:
    """How far the log of one start of a container was read: its second, and how many lines from that second on.

    The second is one of RFC 3339 with its zone, as the API takes it.
    """

    instance: str = ""
    second: str = ""
    lines: int = 0
    """Of the answer that begins with ``second``: those that are known."""

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


@dataclass
class PodLogCopy:
    """The logs of one attempt: ``node-<i>.log`` in ``folder`` for pod i."""

    cluster: KubernetesCluster
    namespace: str
    job: str
    folder: Path
    node: int | None = None
    """Only this node's."""

    def pull(self) -> bool:
        """Append what is new; returns whether more may be there. Raises ``QueryError``."""
        make_folders(self.folder)
        more = False
        for pod in self.cluster.pods(self.namespace, self.job):
            node = node_of(pod)
            if node is not None and self.node in (None, node):
                more |= self._pull_pod(pod, node)
        return more

    def _pull_pod(self, pod: Mapping[str, Any], node: int) -> bool:
        statuses = (pod.get("status") or {}).get("containerStatuses") or ()
        container = next((it for it in statuses if it.get("name") == CONTAINER), None)
        # A container that is about to be started again still has the log of its last start.
        if container is None or not container.get("containerID"):
            return False
        file = self.folder / f"{_SEEN}{node}"
        position = _Position.read(file)
        name, instance = str(pod["metadata"]["name"]), str(container["containerID"])
        if position.instance != instance:
            ended = (container.get("lastState") or {}).get("terminated") or {}
            # The node keeps the log of the start before this one, whose last lines state why it has ended.
            if before := str(ended.get("containerID") or ""):
                if position.instance != before:
                    position = _Position(before)
                while self._pull_start(name, node, file, position, has_ended=True, previous=True):
                    position = _Position.read(file)
            position = _Position(instance)
        has_ended = bool((container.get("state") or {}).get("terminated"))
        return self._pull_start(name, node, file, position, has_ended=has_ended)

    def _pull_start(
        self, pod: str, node: int, file: Path, position: _Position, *, has_ended: bool, previous: bool = False
    ) -> bool:
        """Append what is new of one start of a container."""
        since = position.second or None
        try:
            body = self.cluster.log(self.namespace, pod, CONTAINER, since, MOST_BYTES, previous=previous)
            if len(body) >= MOST_BYTES and body.count(b"\n") <= position.lines:
                # One second has more lines than that, all of which are known: only the whole answer has new ones.
                body = self.cluster.log(self.namespace, pod, CONTAINER, since, None, previous=previous)
        except Refused as error:
            if error.status in _NOT_STARTED:
                return False
            raise
        if body and _TIME.match(body) is None:
            # The node's own words in place of a log that it has removed.
            if body.startswith(_REMOVED):
                return False
            begin = body[:_SHOWN_BYTES].decode("utf-8", "replace")
            raise QueryError(f"the log of pod {pod} has no times in front of its lines; it begins with {begin!r}")
        return self._append(node, file, position, body, has_ended=has_ended)

    def _append(self, node: int, file: Path, position: _Position, body: bytes, *, has_ended: bool) -> bool:
        is_cut = len(body) == MOST_BYTES
        # By line feeds alone: a progress bar returns to the begin of its line.
        *whole, rest = body.split(b"\n")
        lines = [line + b"\n" for line in whole if _TIME.match(line)]
        # What has no line feed is half of a line, which comes whole with the next answer, if there is one.
        if has_ended and not is_cut and _TIME.match(rest):
            lines.append(rest + b"\n")
        # The answer begins with the second that was read last, and holds the lines of it that are known.
        new = lines[position.lines :]
        if not new:
            return False
        with open(self.folder / f"node-{node}.log", "ab", opener=opener) as log:
            log.writelines(line.partition(b" ")[2] for line in new)
            log.flush()
            os.fsync(log.fileno())
        second = _second(new[-1])
        count = sum(_second(line) >= second for line in lines)
        _Position(position.instance, second, count).write(file)
        return is_cut


def _second(line: bytes) -> str:
    match = _TIME.match(line)
    assert match is not None
    return (match[1] + match[2]).decode()
