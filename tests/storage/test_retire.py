"""Taking back the checkpoints after a step."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.storage.publication.keys import Slot
from sm_llm.storage.publication.publish import find_newest, list_checkpoints
from sm_llm.storage.publication.retire import bring_back, retire_after, retire_damaged

Bench = Any


def steps(bench: Bench) -> list[int]:
    return [it.step for it in list_checkpoints(bench.store)]


def test_the_step_becomes_the_newest_and_can_be_published_past_again(bench: Bench) -> None:
    for step in (9, 100, 1000):
        bench.publish(step)
    assert retire_after(bench.store, 9, label="attempt-2") == [100, 1000]
    newest = find_newest(bench.store).commit
    assert newest is not None
    assert newest.step == 9
    kept = [it.key for it in bench.store.list("ckpt/retired/")]
    assert kept == ["ckpt/retired/attempt-2/step-00000100.json", "ckpt/retired/attempt-2/step-00001000.json"]
    bench.publish(100)
    assert steps(bench) == [9, 100]
    assert retire_after(bench.store, 100, label="attempt-3") == []


def test_what_was_rolled_back_in_vain_is_brought_back(bench: Bench) -> None:
    for step in (9, 100, 1000):
        bench.publish(step)
    before = bench.store.list("ckpt/commits/")
    retire_after(bench.store, 9, label="attempt-2")
    bring_back(bench.store, label="attempt-2")
    assert [it.key for it in bench.store.list("ckpt/commits/")] == [it.key for it in before]
    assert steps(bench) == [9, 100, 1000]
    assert bench.store.list("ckpt/retired/") == []


def test_a_crash_in_between_leaves_an_earlier_timeline_and_the_same_call_ends_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        bench.publish(step)
    delete, deleted = bench.store.delete, []

    def crash_at_the_second(keys: list[str]) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.extend(keys)
        delete(keys)

    monkeypatch.setattr(type(bench.store), "delete", lambda self, keys: crash_at_the_second(list(keys)))
    with pytest.raises(KeyboardInterrupt):
        retire_after(bench.store, 1, label="attempt-2")
    monkeypatch.undo()
    assert deleted == [Slot(4).commit_key], "the newest goes first"
    assert steps(bench) == [1, 2, 3]
    retire_after(bench.store, 1, label="attempt-2")
    assert steps(bench) == [1]


def test_damaged_commits_are_quarantined_and_their_slots_are_free_again(bench: Bench) -> None:
    for step in (6, 12, 18):
        bench.publish(step)
    bench.store.delete([next(it.key for it in bench.store.list(Slot(12).prefix) if "/data/" in it.key)])
    assert retire_damaged(bench.store, {12}, run_id=bench.run_id, label="attempt-2") == [12]
    assert steps(bench) == [6, 18]
    bench.publish(12)
    assert [it.valid for it in list_checkpoints(bench.store)] == [True] * 3


def test_what_cannot_be_judged_is_not_quarantined(bench: Bench) -> None:
    for step in (6, 12, 18):
        bench.publish(step)
    key = Slot(12).commit_key
    bench.store.delete([key])
    bench.store.put_if_absent(key, b'{"version": 99}')
    assert retire_damaged(bench.store, None, run_id="another", label="attempt-2") == []
    assert retire_damaged(bench.store, None, run_id=bench.run_id, label="attempt-2") == [6, 18]
    assert bench.store.get(key) == b'{"version": 99}'
