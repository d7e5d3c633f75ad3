"""Notes in torchrun's store: what another user's program reads or writes there is no note of the job."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from torch._C._distributed_c10d import TCPStore

from sm_llm.errors import RunFailed
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.runtime.key_value_store import KeyValueStore, connect
from sm_llm.worker.runtime.message import encode
from sm_llm.worker.supervision.failure_report import FAILED
from sm_llm.worker.supervision.store_all_gather import StoreAllGather, leave_in_order

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "0a" * 16


@pytest.fixture
def torchrun() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))


@pytest.fixture
def stranger(torchrun: TCPStore) -> TCPStore:
    """A second connection, as any program of the machine can make it."""
    return TCPStore("127.0.0.1", torchrun.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=120))


def _store(store: TCPStore, key: str, value: str) -> None:
    """Return when the server has it: ``set`` alone is not answered, another connection may be served first."""
    store.set(key, value)
    store.get(key)


@pytest.fixture
def kv_store(torchrun: TCPStore) -> KeyValueStore:
    environ = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(torchrun.port),
    }
    found = connect("run/1", SECRET, environ)
    assert found is not None
    return found


def test_s05_notes_arrive_and_no_key_or_note_in_the_store_shows_the_secret(
    kv_store: KeyValueStore, stranger: TCPStore
) -> None:
    assert kv_store.get("a") is None
    kv_store.put("a", "t\xe4xt")
    assert (kv_store.get("a"), kv_store.first("b", "one"), kv_store.first("b", "two")) == ("t\xe4xt", "one", "one")
    keys = [key for key in stranger.list_keys() if "sm_llm" in key]
    assert len(keys) == 2
    assert not [key for key in keys if SECRET in key or SECRET.encode() in stranger.get(key)]


@pytest.mark.parametrize(
    "forge",
    [
        lambda note, _: b"x",
        lambda note, _: note[64:],
        lambda note, _: b"0" * 64 + note[64:],
        lambda note, _: note + b" ",
        lambda note, _: b"\xff" * 80,
        lambda _, other: other,
    ],
    ids=["a word", "unsigned", "a guess", "more text", "no text", "another note of the job"],
)
def test_s05_a_note_that_somebody_else_has_written_is_refused(
    kv_store: KeyValueStore, stranger: TCPStore, forge: Callable[[bytes, bytes], bytes]
) -> None:
    kv_store.put("a", "text")
    kv_store.put("b", "other")
    assert kv_store.get("b") == "other"  # an answer on the same connection: the server has both
    first, second = sorted(key for key in stranger.list_keys() if "sm_llm" in key)
    _store(stranger, first, forge(stranger.get(first), stranger.get(second)).decode("latin-1"))
    with pytest.raises(RuntimeError, match="not of this job"):
        kv_store.get("a")
    with pytest.raises(RuntimeError, match="not of this job"):
        kv_store.first("a", "text")


def test_s05_no_value_that_somebody_else_has_put_there_is_gathered(kv_store: KeyValueStore, stranger: TCPStore) -> None:
    kv_store.put("probe", "")
    assert kv_store.get("probe") == ""
    (key,) = (key for key in stranger.list_keys() if "sm_llm" in key)
    _store(stranger, f"{key.removesuffix('probe')}gather/ranks/1/1", encode("forged"))
    with pytest.raises((RunFailed, RuntimeError), match="not of this job"):
        StoreAllGather(kv_store, "ranks", 0, 2, timeout=120)("mine")


LONG = 120.0


def leave(kv_store: KeyValueStore, rank: int, seconds: float = LONG) -> None:
    leave_in_order(kv_store, ProcessInfo(rank=rank, world_size=3), seconds)


def test_no_process_ends_before_all_are_ready_and_the_leader_ends_last(kv_store: KeyValueStore) -> None:
    with ThreadPoolExecutor(3) as threads:
        leader, first = threads.submit(leave, kv_store, 0), threads.submit(leave, kv_store, 1)
        while kv_store.get("leave/ready/1") is None:
            time.sleep(0.01)  # asked without a pause, the connection would never be free for the other threads
        assert kv_store.get("leave/all") is None
        assert not leader.done()
        assert not first.done()
        # The last one is ready, and has read that all are only when it says so.
        kv_store.put("leave/ready/2", "")
        first.result(LONG)
        assert not leader.done()
        kv_store.put("leave/left/2", "")
        leader.result(LONG)


def test_nobody_waits_for_a_process_of_a_job_that_has_failed_or_for_one_that_never_comes(
    kv_store: KeyValueStore,
) -> None:
    leave(kv_store, 0, seconds=0.0)
    leave(kv_store, 1, seconds=0.0)
    kv_store.put(FAILED, "")
    leave(kv_store, 0)
    leave(kv_store, 2)
