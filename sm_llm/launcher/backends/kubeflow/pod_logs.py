"""A copy of the logs of a job's pods in the run's folder on this machine, continued over restarts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
# The API takes whole seconds in sinceTime, and sends fractions of them.
_SECONDS = len("2026-11-29T10:00:00")
# Beside a copy: which part of which container's log it holds already.
_SEEN = ".seen-"
# The API server's answer for a container without a log yet, and for a pod that is gone.
_NOT_STARTED = (400, 404)


@dataclass
class _Position:
    """How far the log of one start of a container was read: its second, and how many lines from that second on."""

    instance: str = ""
    second: str = ""
    lines: int = 0

    @classmethod
    def read(cls, path: Path) -> _Position:
        try:
            instance, second, lines = path.read_text(encoding="utf-8").split("\n")
            return cls(instance, second, int(lines))
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
                while self._pull_start(name, node, file, position, previous=True):
                    position = _Position.read(file)
            position = _Position(instance)
        return self._pull_start(name, node, file, position)

    def _pull_start(self, pod: str, node: int, file: Path, position: _Position, *, previous: bool = False) -> bool:
        """Append what is new of one start of a container."""
        since = f"{position.second}Z" if position.second else None
        try:
            body = self.cluster.log(self.namespace, pod, CONTAINER, since, MOST_BYTES, previous=previous)
            if len(body) >= MOST_BYTES and body.count(b"\n") <= position.lines:
                # One second has more lines than that, all of which are known: only the whole answer has new ones.
                body = self.cluster.log(self.namespace, pod, CONTAINER, since, None, previous=previous)
        except Refused as error:
            if error.status in _NOT_STARTED:
                return False
            raise
        return self._append(node, file, position, body)

    def _append(self, node: int, file: Path, position: _Position, body: bytes) -> bool:
        lines = body.splitlines(keepends=True)
        is_cut = len(body) == MOST_BYTES
        # The last line of a bounded answer may be half of it.
        if is_cut and len(lines) > 1 and not lines[-1].endswith(b"\n"):
            lines.pop()
        # The answer begins with the second that was read last, and holds the lines of it that are known.
        new = lines[position.lines :]
        if not new:
            return False
        with open(self.folder / f"node-{node}.log", "ab", opener=opener) as log:
            log.writelines(line.partition(b" ")[2] for line in new)
            log.flush()
            os.fsync(log.fileno())
        second = new[-1][:_SECONDS].decode("ascii", "replace")
        count = sum(line[:_SECONDS].decode("ascii", "replace") >= second for line in lines)
        _Position(position.instance, second, count).write(file)
        return is_cut
