"""Garbage collection keeps what it must and deletes what it may, in the safe order."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from sm_llm.storage.publication.keys import COMMITS, Slot
from sm_llm.storage.publication.pins import PIN_DAYS, pin
from sm_llm.storage.publication.publish import collect_garbage, find_newest, list_checkpoints, upload_part, write_part

LATER = 1e10


def collect(bench: Any, store: Any = None, **options: Any) -> Any:
    options = {"run_id": bench.run_id, "keep_last": 3, "clock": lambda: LATER} | options
    return collect_garbage(store or bench.store, **options)


def steps(bench: Any) -> list[int]:
    return [it.step for it in list_checkpoints(bench.store) if it.valid]


def orphan(bench: Any, step: int | None, *, half: bool = False) -> Any:
    """A save that was uploaded, but never committed."""
    save = bench.save(step)
    part = upload_part(bench.store, save, bench.sealed({"a": b"1", "b": b"2"}), 0)
    if not half:
        write_part(bench.store, part)
    return save


def test_CK12_the_newest_by_number_stay(bench: Any) -> None:
    for step in (*range(9000, 9900, 100), 9900, 10000):
        bench.publish(step)
    assert collect(bench, keep_last=10).steps == (9000,)
    assert steps(bench) == [*range(9100, 9900, 100), 9900, 10000]


def test_CK13_the_oldest_complete_goes_first_and_the_resume_source_never(bench: Any) -> None:
    for step in range(11):
        bench.publish(step)
    bench.data(bench.publish(11), "b.bin").unlink()  # incomplete: it counts for nothing
    collected = collect(bench, keep_last=3, protect={4})
    assert collected.steps == (0, 1, 2, 3, 5, 6, 7)
    assert steps(bench) == [4, 8, 9, 10]
    assert bench.store.get(Slot(11).commit_key) is not None, "newer than anything valid: not ours to judge"


def test_what_another_run_begins_from_stays_for_a_week(bench: Any) -> None:
    for step in (1, 2, 3):
        bench.publish(step)
    pin(bench.store, 1)
    now = time.time()
    assert collect(bench, keep_last=1, clock=lambda: now).steps == (2,)
    assert collect(bench, keep_last=1, clock=lambda: now + PIN_DAYS * 86400 + 60).steps == (1,)


def test_every_kth_stays(bench: Any) -> None:
    for step in range(10, 110, 10):
        bench.publish(step)
    collect(bench, keep_last=2, keep_every=40)
    assert steps(bench) == [40, 80, 90, 100]


def test_deleted_checkpoints_leave_nothing_behind(bench: Any) -> None:
    sizes = [bench.publish(step).commit.size for step in (1, 2)]
    collected = collect(bench, keep_last=1)
    assert collected.size > sizes[0], "data and part manifests"
    assert not (bench.root / "ckpt/step-00000001").exists()
    assert {it.key.split("/")[1] for it in bench.store.list("ckpt/")} == {"commits", "step-00000002"}
    assert collect(bench, keep_last=1) == type(collected)()


def test_proven_damage_goes_once_a_newer_valid_checkpoint_exists(bench: Any) -> None:
    bench.data(bench.publish(1), "b.bin").unlink()
    assert collect(bench).steps == ()
    bench.publish(2)
    assert collect(bench).steps == (1,)
    assert steps(bench) == [2]


def test_other_runs_and_unreadable_commits_are_left_alone(bench: Any) -> None:
    bench.publish(1, run_id="other-run")
    unreadable = bench.publish(2)
    (bench.root / Slot(2).commit_key).write_bytes(b"{ torn")
    for step in (3, 4, 5):
        bench.publish(step)
    assert collect(bench, keep_last=1).steps == (3, 4)
    assert find_newest(bench.store, run_id="other-run").commit.step == 1
    assert bench.data(unreadable, "b.bin").exists(), "who knows what the torn commit names"


def test_saves_nobody_committed_go_when_they_are_old_and_passed(bench: Any) -> None:
    passed, half, ahead, live = orphan(bench, 5), orphan(bench, 6, half=True), orphan(bench, 99), orphan(bench, 7)
    bench.publish(10)
    now = time.time()
    assert collect(bench, clock=lambda: now).orphans == (), "too young: its writer may be alive"
    collected = collect(bench, live={live.save_id})
    assert set(collected.orphans) == {passed.save_id, half.save_id}
    left = {it.key.split("/")[2] for it in bench.store.list("ckpt/step-")}
    assert {ahead.save_id, live.save_id} < left
    assert steps(bench) == [10]


def test_final_saves_nobody_committed_go_after_the_final_commit(bench: Any) -> None:
    lost = orphan(bench, None)
    bench.publish(10)
    assert collect(bench).orphans == ()
    final = bench.publish(None)
    assert collect(bench).orphans == (lost.save_id,)
    assert bench.data(final, "b.bin").exists()


def test_the_age_is_that_of_the_youngest_object(bench: Any) -> None:
    save = orphan(bench, 5)
    bench.publish(10)
    paths = [bench.root / it.key for it in bench.store.list(save.slot.save_prefix(save.save_id))]
    for path in paths:
        os.utime(path, (1000, 1000))
    os.utime(paths[0], (5000, 5000))
    assert collect(bench, clock=lambda: 5500.0, min_age_seconds=600).orphans == ()
    assert collect(bench, clock=lambda: 5700.0, min_age_seconds=600).orphans == (save.save_id,)


def test_nothing_goes_when_what_should_stay_has_vanished_meanwhile(bench: Any, faulty: Any) -> None:
    published = [bench.publish(step) for step in (1, 2, 3, 4)]
    probe = faulty(bench.store)

    class Vanishing(faulty):  # type: ignore[misc]
        def list(self, prefix: str) -> Any:
            found = super().list(prefix)
            if self.calls.count(f"list {COMMITS}") == 2:
                bench.data(published[3], "b.bin").unlink(missing_ok=True)
            return found

    collected = collect(bench, Vanishing(bench.store), keep_last=2)
    assert collected.refused == "only 1 complete checkpoints would remain, 2 are to be kept"
    assert steps(bench) == [1, 2, 3]
    assert probe.calls == []


def test_commits_go_before_data(bench: Any, faulty: Any) -> None:
    for step in (1, 2, 3):
        bench.publish(step)
    probe = faulty(bench.store)
    collect(bench, probe, keep_last=1)
    deletes = [it for it in probe.calls if it.startswith("delete")]
    assert deletes == ["delete 1", "delete 1", "delete 3", "delete 3"]


@pytest.mark.parametrize("keep_last", [1, 2, 5])
def test_fewer_than_asked_for_are_never_left(bench: Any, keep_last: int) -> None:
    for step in range(4):
        bench.publish(step)
        collect(bench, keep_last=keep_last)
        assert len(steps(bench)) == min(keep_last, step + 1)
