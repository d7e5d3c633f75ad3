"""The copy of pods' logs, over restarts of their containers."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from sm_llm.errors import QueryError
from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster, Refused
from sm_llm.launcher.backends.kubeflow.pod_logs import MOST_STREAMS, PodLogCopy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Text(list[bytes]):
    """An answer in parts."""

    def close(self) -> None:
        pass


@dataclass
class Node:
    """One pod whose container is started again and again; its node keeps the logs of two starts."""

    starts: list[list[str]] = field(default_factory=list)
    part: int = 1 << 16
    late: int = 0
    """Starts that its status does not state yet."""
    uid: str = "1"

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        count = len(self.starts) - self.late
        last = {"terminated": {"containerID": f"c{count - 1}"}} if count > 1 else {}
        status = {"name": "pytorch", "containerID": f"c{count}", "restartCount": count - 1, "lastState": last}
        return [{"metadata": {"name": "x-master-0", "uid": self.uid}, "status": {"containerStatuses": [status]}}]

    def log(self, namespace: str, pod: str, container: str, since: str | None, *, previous: bool, follow: bool) -> Text:
        assert not follow, "no container runs"
        if previous and len(self.starts) < 2:
            raise Refused("previous terminated container not found", 400)
        lines = self.starts[-2 if previous else -1]
        text = "".join(f"{it}\n" for it in lines if since is None or it >= since.rstrip("Z")).encode()
        # However an answer is cut into parts.
        return Text(text[at : at + self.part] for at in range(0, len(text), self.part))


def lines(folder: Path) -> list[str]:
    return (folder / "node-0.log").read_text().split()


def test_the_last_lines_before_a_restart_are_copied(tmp_path: Path) -> None:
    node = Node([["2026-11-29T10:00:00.1Z a", "2026-11-29T10:00:00.2Z b"]])
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    node.starts[0].append("2026-11-29T10:00:01.1Z why-it-ended")
    node.starts.append(["2026-11-29T10:00:02.1Z c"])
    copy.pull()
    assert lines(tmp_path) == ["a", "b", "why-it-ended", "c"]
    copy.pull()
    node.starts[1].append("2026-11-29T10:00:02.3Z d")
    # Two restarts between two looks: the log of the middle one is all that the node still has.
    node.starts += [["2026-11-29T10:00:03.1Z e"], ["2026-11-29T10:00:04.1Z f"]]
    copy.pull()
    assert lines(tmp_path) == ["a", "b", "why-it-ended", "c", "e", "f"]


def test_a_status_that_is_late_repeats_and_loses_nothing(tmp_path: Path) -> None:
    """A node answers with the log of a new start before the API server states that there is one."""
    node = Node([["2026-11-29T10:00:00.1Z a"]])
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    node.starts[0].append("2026-11-29T10:00:00.2Z why-it-ended")
    node.starts.append(["2026-11-29T10:00:00.3Z b"])
    for node.late in (1, 1, 0, 0):
        copy.pull()
        assert lines(tmp_path) == ["a", "why-it-ended", "b"]
    # One that prints nothing yet.
    node.starts[1].append("2026-11-29T10:00:01.25Z again")
    node.starts.append([])
    copy.pull()
    node.starts[2].append("2026-11-29T10:00:01.3Z c")
    copy.pull()
    assert lines(tmp_path) == ["a", "why-it-ended", "b", "again", "c"]


def test_another_pod_of_the_name_may_be_on_a_node_whose_clock_is_behind(tmp_path: Path) -> None:
    node = Node([["2026-11-29T10:00:05.1Z a"]])
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    node.uid, node.starts = "2", [["2026-11-29T10:00:03.1Z b", "2026-11-29T10:00:06.1Z c"]]
    copy.pull()
    copy.pull()
    assert lines(tmp_path) == ["a", "b", "c"]


def test_a_start_that_was_never_seen_is_copied_from_the_node(tmp_path: Path) -> None:
    node = Node([["2026-11-29T10:00:00.1Z a"], ["2026-11-29T10:00:01.1Z b"]])
    PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path).pull()
    assert lines(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("part", [1, 7, 24, 25, 60])
def test_an_answer_in_parts_is_copied_line_by_line(tmp_path: Path, part: int) -> None:
    node = Node([["2026-11-29T10:00:00.1Z a"]], part)
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    node.starts[0] += [f"2026-11-29T10:00:0{it}.1Z line-{it}" for it in range(1, 7)]
    node.starts.append(["2026-11-29T10:00:09.1Z end"])
    copy.pull()
    assert lines(tmp_path) == ["a", *(f"line-{it}" for it in range(1, 7)), "end"]


def copied(folder: Path) -> bytes:
    return (folder / "node-0.log").read_bytes()


@dataclass
class Answers:
    """One pod whose container runs; its node answers with whatever comes next."""

    bodies: list[bytes]
    asked: list[str | None] = field(default_factory=list)
    has_ended: bool = False

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        state = {"terminated": {"exitCode": 0}} if self.has_ended else {"running": {}}
        status = {"name": "pytorch", "containerID": "c1", "state": state}
        return [{"metadata": {"name": "x-master-0"}, "status": {"containerStatuses": [status]}}]

    def log(self, *args: Any, **named: Any) -> Text:
        self.asked.append(args[3])
        return Text([self.bodies.pop(0)])


def test_lines_of_progress_bars_and_halves_of_characters_are_copied_as_they_are(tmp_path: Path) -> None:
    """A carriage return begins no line of its own: what follows it has no time in front."""
    bar = "2026-11-29T10:00:00.1Z  10%|█\r 50%|██\r100%|███\n".encode()
    half = "2026-11-29T10:00:01.1Z größ".encode()[:-1]
    whole = "2026-11-29T10:00:01.1Z größer\n".encode()
    node = Answers([bar + half, bar + half, bar + whole, whole + b"2026-11-29T10:00:02.1Z last"])
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    assert copied(tmp_path) == " 10%|█\r 50%|██\r100%|███\n".encode()
    copy.pull()
    copy.pull()
    assert copied(tmp_path).decode().endswith("100%|███\ngrößer\n")
    node.has_ended = True
    copy.pull()
    assert copied(tmp_path).decode().endswith("größer\nlast\n")
    assert node.asked == [None, *["2026-11-29T10:00:00Z"] * 2, "2026-11-29T10:00:01Z"]


def test_a_node_in_another_time_zone(tmp_path: Path) -> None:
    node = Answers(
        [b"2026-11-29T12:00:00.1+02:00 a\n", b"2026-11-29T12:00:00.1+02:00 a\n2026-11-29T12:00:01+02:00 b\n"]
    )
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    copy.pull()
    assert copied(tmp_path) == b"a\nb\n"
    assert node.asked == [None, "2026-11-29T12:00:00+02:00"]


def test_an_answer_without_times_is_no_log(tmp_path: Path) -> None:
    line = b"2026-11-29T10:00:00.1Z a\n"
    node = Answers(
        [
            line,
            *[b"unable to retrieve container logs for containerd://c1"] * 2,
            *[b"<html>Please log in</html>"] * 4,
            line,
        ]
    )
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    copy.pull()
    with pytest.raises(QueryError, match=r"the log of pod x-master-0 has no times .* begins with '<html>Please log in"):
        copy.pull()
    copy.pull()
    assert copied(tmp_path) == b"a\n"


def test_a_clock_that_is_set_back_repeats_and_loses_nothing(tmp_path: Path) -> None:
    node = Node([["2026-11-29T10:00:05.1Z a", "2026-11-29T10:00:06.1Z b", "2026-11-29T10:00:05.9Z c"]])
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.pull()
    node.starts[0] += ["2026-11-29T10:00:06.9Z d", "2026-11-29T10:00:07.1Z e"]
    copy.pull()
    assert lines(tmp_path) == ["a", "b", "c", "d", "e"]


def test_two_processes_that_copy_one_log_add_each_line_once(tmp_path: Path) -> None:
    """The log of a run that is followed in two terminals."""
    written = [f"2026-11-29T10:00:{it // 40:02}.{it % 40:02}Z {it}" for it in range(400)]
    node = Node([[]], part=100)
    copies = [PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path) for _ in range(3)]
    is_over = threading.Event()

    def pull(copy: PodLogCopy) -> None:
        while not is_over.is_set():
            copy.pull()

    threads = [threading.Thread(target=pull, args=(it,)) for it in copies]
    for thread in threads:
        thread.start()
    for line in written:
        node.starts[0].append(line)
    is_over.set()
    for thread in threads:
        thread.join()
    copies[0].pull()
    assert lines(tmp_path) == [str(it) for it in range(400)]


class Live:
    """An answer that lasts as long as its container."""

    def __init__(self) -> None:
        self.parts: queue.Queue[bytes | None] = queue.Queue()
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.parts.get, None)

    def close(self) -> None:
        self.is_closed = True
        self.parts.put(None)


@dataclass
class Pods:
    """Pods whose containers run, each with one line."""

    count: int
    start: int = 1
    streams: dict[str, list[Live]] = field(default_factory=dict)

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        last = {"terminated": {"containerID": f"c{self.start - 1}"}} if self.start > 1 else {}
        status = {"name": "pytorch", "containerID": f"c{self.start}", "state": {"running": {}}, "lastState": last}
        # In no order, as the API server lists names.
        names = [f"x-worker-{it}" for it in reversed(range(self.count - 1))]
        return [{"metadata": {"name": it}, "status": {"containerStatuses": [status]}} for it in (*names, "x-master-0")]

    def log(self, namespace: str, pod: str, container: str, since: str | None, *, previous: bool, follow: bool) -> Any:
        if follow:
            self.streams.setdefault(pod, []).append(Live())
            return self.streams[pod][-1]
        start = self.start - previous
        return Text([f"2026-11-29T10:00:0{start}.1Z start-{start}\n".encode()])


def await_line(folder: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while line not in lines(folder):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_container_prints_is_copied_as_it_comes_and_over_a_restart(tmp_path: Path) -> None:
    node = Pods(1)
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.follow()
    [stream] = node.streams["x-master-0"]
    stream.parts.put(b"2026-11-29T10:00:01.1Z start-1\n2026-11-29T10:00:01.2Z more\n2026-11-29T10:00:01.3Z ha")
    await_line(tmp_path, "more")
    copy.follow()
    stream.parts.put(b"lf\n")
    await_line(tmp_path, "half")
    assert len(node.streams["x-master-0"]) == 1, "asked for once"
    # Its node is gone, and the answer would never end.
    node.start = 2
    copy.follow()
    assert stream.is_closed
    assert lines(tmp_path) == ["start-1", "more", "half", "start-2"]
    copy.close()
    assert [it.is_closed for it in node.streams["x-master-0"]] == [True, True]
    copy.pull()
    assert lines(tmp_path) == ["start-1", "more", "half", "start-2"]


def test_the_first_pods_are_streamed_and_the_others_asked(tmp_path: Path) -> None:
    """Each stream holds a connection to the API server."""
    node = Pods(12)
    copy = PodLogCopy(cast("KubernetesCluster", node), "team", "x", tmp_path)
    copy.follow()
    copy.follow()
    assert set(node.streams) == {"x-master-0", *(f"x-worker-{it}" for it in range(MOST_STREAMS - 1))}
    assert all(len(it) == 1 for it in node.streams.values())
    assert {it.name for it in tmp_path.glob("node-*.log")} == {f"node-{it}.log" for it in range(12)}
    copy.close()
