"""Pods of one start: they begin together, and learn when one is lost."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from sm_llm.worker.kubeflow.group import Group, _Line
from tests.fixtures.s3_server import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from sm_llm.worker.kubeflow.group import GroupStart


def group(pod: int, pods: int, port: int, job: str = "tiny-1/1", **elastic: Any) -> Group:
    return Group(job, pod, pods, ("127.0.0.1", port), lambda text: None, **elastic)


def started(groups: list[Group]) -> list[GroupStart | None]:
    found: dict[int, GroupStart | None] = {}
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


def test_DL22_SL20_every_start_has_a_rendezvous_of_its_own() -> None:
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


def test_SL19_a_lost_pod_is_noticed_by_all_and_an_orderly_end_is_none() -> None:
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


def test_what_is_not_of_the_job_ends_no_pod() -> None:
    """Anybody in the cluster's network may connect; JSON that is nested too deep is no ValueError."""
    [port] = free_ports(1)
    first, second = groups = [group(pod, 2, port) for pod in range(2)]
    over = threading.Event()
    thread = begin(first, over)
    for text in (b"[" * 4000 + b"\n", b"\xff\n", b"null\n", b"{}\n"):
        with socket.socket() as stranger:
            await_(lambda stranger=stranger: stranger.connect_ex(("127.0.0.1", port)) == 0)  # type: ignore[misc]
            stranger.sendall(text)
            stranger.recv(1)
    assert thread.is_alive()
    second_start = begin(second, over)
    thread.join(60)
    second_start.join(60)
    assert not thread.is_alive()
    for it in reversed(groups):
        it.close(0)


def test_a_stranger_that_sends_a_byte_now_and_then_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm_llm.worker.kubeflow.group._LINE_SECONDS", 0.2)
    own, other = socket.socketpair()
    is_read = threading.Event()

    def drip() -> None:
        while not is_read.wait(0.02):
            other.sendall(b"x")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    answers: list[object] = []
    reader = threading.Thread(target=lambda: answers.append(_Line(own).receive()), daemon=True)
    reader.start()
    reader.join(60)
    is_read.set()
    thread.join(60)
    assert answers == [None]
    own.close()
    other.close()


def begin(found: Group, over: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=found.start, args=(over.is_set,), daemon=True)
    thread.start()
    return thread


def await_(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pods_that_are_there_begin_without_the_others_in_an_allowed_number() -> None:
    [port] = free_ports(1)
    first, third, fourth = [group(pod, 4, port, sizes=(2,), wait_seconds=0.0) for pod in (0, 2, 3)]
    over = threading.Event()
    for thread in (begin(third, over), begin(first, over)):
        thread.join(60)
    assert first._members == third._members == (0, 2), "the ranks follow the pods"

    # One more is no allowed number: it waits, and its loss is nobody's.
    waiting = begin(fourth, over)
    await_(lambda: first.lost() != "" or 3 in first._peers)
    assert first.lost() == ""
    over.set()
    waiting.join(60)
    await_(lambda: first.lost() != "" or 3 not in first._peers)
    assert (first.lost(), third.lost()) == ("", "")
    for it in (third, first):
        it.close(75)


def test_a_pod_that_is_needed_lets_the_others_save_and_begin_again() -> None:
    [port] = free_ports(1)
    first, second = [group(pod, 2, port, sizes=(1,), wait_seconds=0.0) for pod in range(2)]
    assert first.start(lambda: False) is not None
    assert first._members == (0,)
    over = threading.Event()
    joining = begin(second, over)
    assert await_lost(first) == "pod 1 joins"
    assert first.is_orderly
    over.set()
    first.close(75)
    joining.join(60)
    assert not joining.is_alive()


def test_notes_that_arrive_together_are_all_read() -> None:
    """The second was left in memory, where no connection reports it."""
    [port] = free_ports(1)
    first, second = groups = [group(pod, 2, port) for pod in range(2)]
    assert None not in started(groups)
    first._peers[1].connection.sendall(b'{"stopped": true}\n{"code": 0}\n')
    await_(lambda: second.lost() != "" or 0 in second._done)
    assert second.lost() == ""
    for it in groups:
        it.close(75)


def test_a_pod_that_is_being_ended_stops_no_run() -> None:
    """The processes of all pods stop together: their pods must not report that the work is done."""
    [port] = free_ports(1)
    first, second, third = groups = [group(pod, 3, port) for pod in range(3)]
    assert None not in started(groups)
    second.announce_end()
    assert await_lost(first) == await_lost(third) == "pod 1 is being ended"
    assert first.is_orderly
    assert third.is_orderly
    assert not first.have_stopped(60)
    assert not third.have_stopped(60)
    for it in groups:
        it.close(75)


def test_all_pods_stop_where_the_run_was_asked_to() -> None:
    [port] = free_ports(1)
    groups = [group(pod, 3, port) for pod in range(3)]
    assert None not in started(groups)
    found: dict[int, bool] = {}
    threads = [
        threading.Thread(target=lambda it=it: found.update({it.pod: it.have_stopped(60)}), daemon=True) for it in groups
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: True, 1: True, 2: True}
    for it in reversed(groups):
        it.close(0)
