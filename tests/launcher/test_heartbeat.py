"""A run's beats against a store that hangs: no silence that another machine would take for death."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.local.store_heartbeat import store_tasks
from sm_llm.runs import heartbeat
from sm_llm.runs.replication.periodic_task import ROUND_SECONDS, PeriodicTask
from sm_llm.runs.run_store import run_store_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.runs.run_store import RunStore


@pytest.fixture
def run_store(bucket: str, fault_proxy: Any) -> RunStore:
    return run_store_at(f"s3://{bucket}/runs/x", {"endpoint_url": fault_proxy.endpoint})


@pytest.fixture
def periodics(run_store: RunStore, fault_proxy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PeriodicTask]]:
    """What reports an attempt, in quick rounds, with a beat in each."""
    monkeypatch.setitem(PeriodicTask.__init__.__kwdefaults__, "round_seconds", 0.01)
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.0)
    found = store_tasks(run_store, 1)
    yield found
    fault_proxy.set()
    for it in found:  # to their end: what they have to tell is nothing for the next test's output
        it.close(60)


def wait_for(proxy: Any, match: str, count: int) -> None:
    deadline = time.monotonic() + 100
    while proxy.count(match) < count:
        assert time.monotonic() < deadline, f"{match}: waited in vain"
        time.sleep(0.01)


def test_a_beat_that_fails_and_the_one_after_it_are_over_before_silence_means_death() -> None:
    tries = heartbeat.CONFIG["retries"]["total_max_attempts"]
    longest = tries * (heartbeat.CONFIG["connect_timeout"] + heartbeat.CONFIG["read_timeout"])
    between = heartbeat.BEAT_SECONDS + ROUND_SECONDS + longest + ROUND_SECONDS + longest
    assert between < heartbeat.SILENT_SECONDS


def test_a_beat_is_sent_again_soon_when_the_store_hangs(
    run_store: Any, fault_proxy: Any, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(heartbeat.CONFIG, "read_timeout", 0.5)
    fault_proxy.set(rule("PUT .*/alive", "hang", seconds=30))
    heartbeat.Heartbeat(heartbeat.impatient(run_store.store), 1).beat()
    assert fault_proxy.count("PUT .*/alive") == 2
    assert heartbeat.silence(run_store.store) is not None


@pytest.mark.parametrize("held_up", ["GET .*/stop", "GET .*prefix=runs.*events"])
def test_a_run_beats_while_its_other_messages_hang(
    periodics: list[PeriodicTask], fault_proxy: Any, rule: Any, held_up: str
) -> None:
    fault_proxy.set(rule(held_up, "hold", count=10**6))
    for it in periodics:
        it.start()
    wait_for(fault_proxy, held_up, 1)
    wait_for(fault_proxy, "PUT .*/alive", fault_proxy.count("PUT .*/alive") + 3)
    assert fault_proxy.count(held_up) == 1, "it still hangs"
