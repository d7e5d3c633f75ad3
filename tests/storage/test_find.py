"""Which checkpoint counts: by number, of this run, whole; or an error, never silence."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.publication.keys import COMMITS, FINAL, Slot, save_of_key, slot_of_commit
from sm_llm.storage.publication.publish import find_final, find_newest, list_checkpoints, verify


def damage(bench: Any, published: Any, how: str) -> None:
    """Spoil one file of a publication."""
    path = bench.data(published, "b.bin")
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "missing":
        path.unlink()
    elif how == "altered":
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    else:
        other = bench.data(published, "model/a.bin")
        body = path.read_bytes()
        path.write_bytes(other.read_bytes())
        other.write_bytes(body)


def newest(bench: Any) -> int | None:
    found = find_newest(bench.store, run_id=bench.run_id).commit
    return found and found.step


def test_layout_reads_back_what_it_writes() -> None:
    for step in (0, 9, 99_999_999, 123_456_789_012):
        slot = Slot(step)
        assert slot_of_commit(slot.commit_key) == slot
        assert save_of_key(slot.part_key("0a" * 16, 3)) == (slot, "0a" * 16, slot.save_prefix("0a" * 16))
    assert slot_of_commit(FINAL.commit_key) == FINAL
    assert save_of_key(f"{FINAL.data_prefix('0b' * 16)}x/y") == (FINAL, "0b" * 16, FINAL.save_prefix("0b" * 16))
    for stranger in (f"{COMMITS}latest.json", f"{COMMITS}step-x.json", f"{COMMITS}step-1.json.tmp", "step-1.json"):
        assert slot_of_commit(stranger) is None


def test_a_new_run_has_no_checkpoint(bench: Any) -> None:
    assert find_newest(bench.store) == find_newest(bench.store, run_id=bench.run_id)
    assert (newest(bench), list_checkpoints(bench.store), find_final(bench.store)) == (None, [], None)


def test_CK12_steps_are_numbers_not_names(bench: Any) -> None:
    for step in (9900, 10000, 9, 100):
        bench.publish(step)
    folder = bench.root / COMMITS
    (folder / "step-00000009.json").rename(folder / "step-9.json")
    (folder / "step-00010000.json").rename(folder / "step-10000.json")
    (folder / "step-00000100.json").rename(folder / "step-0100.json")
    assert [it.step for it in list_checkpoints(bench.store)] == [9, 100, 9900, 10000]
    assert newest(bench) == 10000
    bench.publish(100_000_000)
    assert newest(bench) == 100_000_000


def test_CK15_times_of_files_state_nothing(bench: Any) -> None:
    steps = [3, 30, 300, 7]
    for step in steps:
        bench.publish(step)
    paths = [it for it in bench.root.rglob("*") if it.is_file()]
    random.Random(4).shuffle(paths)
    for age, path in enumerate(paths):
        os.utime(path, (1_700_000_000 - age, 1_700_000_000 - age))
    assert newest(bench) == 300
    assert [it.step for it in list_checkpoints(bench.store)] == sorted(steps)


def test_CK09_no_pointer_is_needed_and_none_is_believed(bench: Any) -> None:
    bench.publish(10)
    bench.publish(20)
    for name in ("latest", "ckpt/latest.json", f"{COMMITS}latest.json"):
        (bench.root / name).write_text('{"step": 10}')
    assert newest(bench) == 20
    # Without its commit a checkpoint does not exist, and the one before it is found from the listing alone.
    (bench.root / Slot(20).commit_key).unlink()
    assert newest(bench) == 10


def test_another_runs_commits_are_ignored(bench: Any) -> None:
    bench.publish(10)
    bench.publish(99, run_id="other-run")
    bench.publish(None, run_id="other-run")
    assert newest(bench) == 10
    assert [it.step for it in list_checkpoints(bench.store, run_id=bench.run_id)] == [10]
    assert find_final(bench.store, run_id=bench.run_id) is None
    assert find_newest(bench.store, run_id="third-run").commit is None
    assert find_newest(bench.store).commit.step == 99


@pytest.mark.parametrize("how", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_used_loudly(bench: Any, how: str) -> None:
    bench.publish(10)
    damage(bench, bench.publish(20), how)
    found = find_newest(bench.store, run_id=bench.run_id)
    assert found.commit.step == 10
    assert [it.step for it in found.rejected] == [20]
    assert "'b.bin'" in str(found.rejected[0])
    infos = list_checkpoints(bench.store)
    assert [(it.step, it.valid) for it in infos] == [(10, True), (20, False)]
    assert infos[0].size == sum(it.size for it in found.commit.files)
    assert infos[0].time == found.commit.time


@pytest.mark.parametrize("how", ["truncated", "missing", "altered", "swapped"])
def test_a_deep_look_sees_every_damage(bench: Any, how: str) -> None:
    published = bench.publish(20)
    assert verify(bench.store, published.commit, deep=True) == []
    damage(bench, published, how)
    assert verify(bench.store, published.commit, deep=True) != []


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"", "not whole JSON"), (b'{"version": 7}', "version 7 is not known"), (b'{"version": 1}', "own checksum")],
)
def test_a_commit_that_cannot_be_read_is_passed_over_loudly(bench: Any, body: bytes, reason: str) -> None:
    bench.publish(10)
    bench.store.put_if_absent(Slot(20).commit_key, body)
    found = find_newest(bench.store)
    assert found.commit.step == 10
    assert reason in str(found.rejected[0])


def test_a_commit_under_another_steps_name_is_refused(bench: Any) -> None:
    bench.publish(10)
    bench.publish(20)
    folder = bench.root / COMMITS
    (folder / "step-00000020.json").rename(folder / "step-00000090.json")
    found = find_newest(bench.store)
    assert found.commit.step == 10
    assert str(found.rejected[0]) == "step 90: its commit is of step 20"


def test_checkpoints_of_which_none_is_usable_are_an_error_never_a_fresh_start(bench: Any) -> None:
    for step in (10, 20):
        damage(bench, bench.publish(step), "missing")
    with pytest.raises(CheckpointError, match="none can be used") as caught:
        find_newest(bench.store, run_id=bench.run_id)
    assert "step 20" in str(caught.value)
    assert "step 10" in str(caught.value)


def test_a_storage_error_is_never_no_checkpoint(bench: Any, faulty: Any) -> None:
    bench.publish(10)
    probe = faulty(bench.store)
    find_newest(probe)
    for at in range(len(probe.calls)):
        with pytest.raises(StorageError, match="does not answer"):
            find_newest(faulty(bench.store, at, "refused"))
    with pytest.raises(StorageError, match="does not exist"):
        find_newest(type(bench.store)(bench.root / "elsewhere"))


@pytest.mark.parametrize("deep", [False, True])
def test_a_checkpoint_that_is_collected_while_it_is_read_is_not_there(bench: Any, deep: bool) -> None:
    doomed = bench.publish(10).commit
    bench.publish(20)

    class Collecting(type(bench.store)):  # type: ignore[misc]
        def _collect(self) -> None:
            self.delete([Slot(10).commit_key, *(doomed.save.data_prefix + it.path for it in doomed.files)])

        def list(self, prefix: str) -> Any:
            if not deep and prefix == doomed.save.data_prefix:
                self._collect()
            return super().list(prefix)

        def checksum(self, key: str) -> str:
            self._collect()
            return str(super().checksum(key))

    infos = list_checkpoints(Collecting(bench.root), deep=deep)
    assert [(it.step, it.valid) for it in infos] == [(20, True)]


def test_the_choice_can_be_narrowed(bench: Any) -> None:
    for step in (10, 20, 30):
        bench.publish(step)
    assert find_newest(bench.store, allow_step=lambda step: step <= 20).commit.step == 20
    assert find_newest(bench.store, allow_step=lambda step: step == 15).commit is None


def test_a_damaged_final_result_is_an_error(bench: Any) -> None:
    published = bench.publish(None)
    assert find_final(bench.store, run_id=bench.run_id) == published.commit
    damage(bench, published, "missing")
    with pytest.raises(CheckpointError, match=r"final result cannot be used: 'b\.bin' is missing"):
        find_final(bench.store)
