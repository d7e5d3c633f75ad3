"""Pods of one start: they begin together, and learn when one is lost."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

from sm_llm.worker.kubeflow.group import Group
from tests.fixtures.s3_server import free_ports

if TYPE_CHECKING:
    from sm_llm.worker.kubeflow.group import Start


def group(pod: int, pods: int, port: int, job: str = "tiny-1/1") -> Group:
    return Group(job, pod, pods, ("127.0.0.1", port), lambda text: None)


def started(groups: list[Group]) -> list[Start | None]:
    found: dict[int, Start | None] = {}
    threads = [
        threading.Thread(target=lambda it=it: found.update({it.pod: it.start(lambda: False)}), daemon=True)
        for it in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found.get(it.pod) for it in groups]


def await_lost(found: Group) -> str:
    deadline = time.monotonic() + 60
    while not (why := found.lost()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return why


def test_DL22_every_start_has_a_rendezvous_of_its_own() -> None:
    """kubeflow/trainer#1638: an etcd rendezvous stayed closed after one pod had died."""
    [port] = free_ports(1)
    names = set()
    for _ in range(2):
        groups = [group(pod, 3, port) for pod in range(3)]
        starts = started(groups)
        assert None not in starts
        assert len({str(it) for it in starts}) == 1, "all pods know the same"
        names.add(str(starts[0]))
        for it in reversed(groups):
            it.close(1)
    assert len(names) == 2


def test_a_lost_pod_is_noticed_by_all_and_an_orderly_end_is_none() -> None:
    [port] = free_ports(1)
    first, second, third = groups = [group(pod, 3, port) for pod in range(3)]
    assert None not in started(groups)
    second.close(0)
    assert first.lost() == ""
    for peer in third._peers.values():
        peer.connection.shutdown(socket.SHUT_RDWR)  # as when its process is killed
    assert await_lost(first) == "pod 2 is lost"
    assert await_lost(third) == "pod 0 is lost"
    first.close(75)


def test_a_failure_of_one_is_that_of_all() -> None:
    [port] = free_ports(1)
    first, second = groups = [group(pod, 2, port) for pod in range(2)]
    assert None not in started(groups)
    second.close(1)
    assert await_lost(first) == "pod 1 has failed"
    first.close(75)


def test_a_pod_that_comes_back_ends_the_start_that_it_was_in() -> None:
    [port] = free_ports(1)
    first, second = groups = [group(pod, 2, port) for pod in range(2)]
    assert None not in started(groups)
    with socket.create_connection(("127.0.0.1", port)) as again:
        again.sendall(b'{"job": "tiny-1/1", "pod": 1}\n')
        assert await_lost(first) == "a pod has been started again"
    first.close(75)
    second.close(75)


def test_pods_of_other_jobs_are_turned_away() -> None:
    [port] = free_ports(1)
    first, second = groups = [group(pod, 2, port) for pod in range(2)]
    over = threading.Event()
    stranger = group(1, 2, port, job="other/1")
    thread = threading.Thread(target=stranger.start, args=(over.is_set,), daemon=True)
    thread.start()
    assert None not in started(groups)
    assert first.lost() == ""
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    for it in (second, first):
        it.close(0)
