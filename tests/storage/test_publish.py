"""Publishing: one commit or none, and everybody knows which."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.publication.keys import FINAL, Slot
from sm_llm.storage.publication.publish import commit, find_newest, new_save, publish, seal, upload_part, write_part

if TYPE_CHECKING:
    from pathlib import Path


def test_a_publication_lies_where_the_layout_states(bench: Any) -> None:
    published = bench.publish(1200, meta={"world": 1})
    prefix = f"ckpt/step-00001200/{published.commit.save_id}/"
    assert [it.key for it in bench.store.list("")] == [
        "ckpt/commits/step-00001200.json",
        f"{prefix}data/b.bin",
        f"{prefix}data/model/a.bin",
        f"{prefix}part-0.json",
    ]
    assert published.won
    assert published.commit.meta == {"world": 1}
    assert json.loads(bench.store.get(Slot(1200).commit_key))["save"]["step"] == 1200


def test_the_final_result_has_its_own_place(bench: Any) -> None:
    published = bench.publish(None)
    assert bench.data(published, "b.bin").read_bytes().startswith(b"optimiser of None")
    assert bench.store.get(FINAL.commit_key) is not None
    assert published.commit.save.data_prefix == f"final/{published.commit.save_id}/data/"


def test_sealing_is_once_and_of_plain_files_only(tmp_path: Path) -> None:
    working = tmp_path / "working"
    with pytest.raises(StorageError, match="cannot read"):
        seal(working, tmp_path / "sealed")
    working.mkdir()
    with pytest.raises(StorageError, match="no file to publish"):
        seal(working, tmp_path / "sealed")
    (working / "a").write_bytes(b"x")
    (working / "link").symlink_to(working / "a")
    with pytest.raises(StorageError, match="not a plain file"):
        seal(working, tmp_path / "sealed")
    (working / "link").unlink()
    assert seal(working, tmp_path / "sealed") == tmp_path / "sealed"
    assert not working.exists()
    working.mkdir()
    with pytest.raises(StorageError, match="sealed already"):
        seal(working, tmp_path / "sealed")


def nodes(bench: Any, together: Any, count: int, work: Any = None, **options: Any) -> list[Any]:
    """Publish step 10 from ``count`` nodes with two processes each; ``work`` maps a rank to its store."""
    save = new_save(bench.run_id, 10, world_size=2 * count, node_count=count)
    sealed = [bench.sealed({f"node-{node}.bin": b"%d" % node * 1000}) for node in range(count)]

    def run(rank: int, gather: Any) -> Any:
        return publish(
            work(rank) if work else bench.store,
            save,
            sealed[rank // 2] if rank % 2 == 0 else None,
            node=rank // 2,
            leader=rank == 0,
            gather=gather,
            **options,
        )

    return together(2 * count, run)


def test_every_node_brings_its_files_and_all_learn_the_outcome(bench: Any, together: Any) -> None:
    results = nodes(bench, together, 3)
    assert all(it == results[0] and it.won for it in results)
    assert [it.path for it in results[0].commit.files] == [f"node-{node}.bin" for node in range(3)]
    assert (results[0].commit.save.world_size, results[0].commit.save.node_count) == (6, 3)


def test_one_failing_node_means_no_commit_for_all_and_no_leftovers(bench: Any, together: Any, faulty: Any) -> None:
    results = nodes(bench, together, 2, lambda rank: faulty(bench.store, 0 if rank == 2 else -1, "refused"))
    assert all(isinstance(it, StorageError) for it in results)
    assert {str(it) for it in results} == {"step 10 was not published: process 2: the store does not answer"}
    assert bench.store.list("ckpt/") == []


def test_a_mistake_of_our_own_strands_nobody(bench: Any, together: Any) -> None:
    results = nodes(bench, together, 2, meta={"loss": float("nan")})
    assert all("process 0: ValueError" in str(it) for it in results)
    assert find_newest(bench.store).commit is None


def test_CK07_nothing_is_visible_before_the_slowest_node_is_done(bench: Any, together: Any, faulty: Any) -> None:
    seen: list[Any] = []
    polled = threading.Event()

    class Slow(faulty):  # type: ignore[misc]
        def put_file(self, source: Path, key: str) -> Any:
            polled.wait(120)
            return super().put_file(source, key)

    def poll() -> None:
        seen.append(find_newest(bench.store).commit)
        polled.set()

    timer = threading.Timer(0.2, poll)
    timer.start()
    results = nodes(bench, together, 2, lambda rank: Slow(bench.store) if rank == 2 else bench.store)
    timer.join()
    assert seen == [None]
    assert find_newest(bench.store).commit == results[0].commit


def test_a_part_that_is_missing_or_contradicts_the_save_stops_the_commit(bench: Any) -> None:
    save = new_save(bench.run_id, 5, world_size=2, node_count=2)
    write_part(bench.store, upload_part(bench.store, save, bench.sealed({"a": b"1"}), 0))
    with pytest.raises(StorageError, match=r"part-1\.json' is missing: node 1"):
        commit(bench.store, save)
    other = save.model_copy(update={"world_size": 4})
    write_part(bench.store, upload_part(bench.store, other, bench.sealed({"b": b"2"}), 1))
    with pytest.raises(StorageError, match="another world size"):
        commit(bench.store, save)
    assert bench.store.get(save.slot.commit_key) is None


def test_no_path_comes_from_two_nodes(bench: Any) -> None:
    save = new_save(bench.run_id, 5, world_size=2, node_count=2)
    part = upload_part(bench.store, save, bench.sealed({"a": b"1"}), 0)
    for node in (0, 1):
        write_part(bench.store, part.model_copy(update={"node": node}))
    with pytest.raises(StorageError, match="'a' comes from more than one node"):
        commit(bench.store, save)


def test_two_nodes_of_one_number_are_noticed(bench: Any) -> None:
    save = new_save(bench.run_id, 5, world_size=2, node_count=2)
    for name in ("a", "b"):
        part = upload_part(bench.store, save, bench.sealed({name: b"1"}), 0)
        if name == "a":
            write_part(bench.store, part)
            write_part(bench.store, part)  # the same part again is a repeated request, not a second node
    with pytest.raises(StorageError, match="two nodes call themselves 0"):
        write_part(bench.store, part)


@pytest.mark.parametrize("change", ["short", "gone", "extra"])
def test_the_commit_reads_the_data_itself(bench: Any, change: str) -> None:
    save = bench.save(5)
    write_part(bench.store, upload_part(bench.store, save, bench.sealed({"a": b"123", "b": b"456"}), 0))
    data = bench.root / save.data_prefix
    if change == "short":
        (data / "a").write_bytes(b"12")
    elif change == "gone":
        (data / "a").unlink()
    else:
        (data / "c").write_bytes(b"?")
    with pytest.raises(StorageError, match="the parts say"):
        commit(bench.store, save)


def test_an_upload_that_arrived_otherwise_is_not_a_part(bench: Any) -> None:
    class Liar:
        name = "liar"

        def upload(self, store: Any, copies: Any, progress: Any) -> Any:
            stored = [store.put_file(it.path, it.key) for it in copies]
            return [*stored[:-1], store.put_file(copies[-1].path.with_name("other"), "other")]

        def download(self, *_: Any) -> None:
            raise AssertionError

    sealed = bench.sealed({"a": b"1", "b": b"2"})
    (sealed.parent / "other").write_bytes(b"3")
    (sealed / "other").write_bytes(b"3")
    with pytest.raises(StorageError, match="but the original has"):
        upload_part(bench.store, bench.save(5), sealed, 0, transfer=Liar())


def test_racing_writers_of_a_step_one_wins_and_all_losers_know(bench: Any, together: Any) -> None:
    for step in range(10):
        results = together(5, lambda _, __, step=step: bench.publish(step, {"x": b"same size"}))
        winners = [it for it in results if it.won]
        assert len(winners) == 1
        assert all(it.commit == winners[0].commit for it in results)
        assert all("committed first by another save" in it.reason for it in results if not it.won)
        saves = {it.key.split("/")[2] for it in bench.store.list(Slot(step).prefix)}
        assert saves == {winners[0].commit.save_id}, "losers drop what they stored"


def test_another_runs_commit_in_the_slot_is_reported(bench: Any) -> None:
    bench.publish(5, run_id="other-run")
    lost = bench.publish(5)
    assert not lost.won
    assert "run 'other-run'" in lost.reason


def test_an_unreadable_commit_in_the_slot_is_reported_and_nothing_deleted(bench: Any) -> None:
    bench.store.put_if_absent(Slot(5).commit_key, b"{ torn")
    lost = bench.publish(5)
    assert (lost.won, lost.commit) == (False, None)
    assert "cannot be used: it is not whole JSON" in lost.reason
    assert bench.store.list(Slot(5).prefix) != []


def test_a_lost_answer_never_yields_two_outcomes(bench: Any, faulty: Any) -> None:
    probe = faulty(bench.store)
    bench.publish(0, store=probe)
    for at, call in enumerate(probe.calls):
        step = 100 + at
        store = faulty(bench.store, at, "lost")
        if call.startswith("put "):
            assert bench.publish(step, store=store).won
        else:
            with pytest.raises(StorageError, match="the answer was lost"):
                bench.publish(step, store=store)
        newest = find_newest(bench.store, allow_step=lambda it, step=step: it == step).commit
        assert (newest is not None) == call.startswith("put ")


def test_a_store_that_stays_away_is_an_error_and_the_old_commit_stays(bench: Any, faulty: Any) -> None:
    old = bench.publish(1).commit
    probe = faulty(bench.store)
    bench.publish(2, store=probe)
    for at in range(len(probe.calls)):
        with pytest.raises(StorageError, match="step 3 was not published"):
            bench.publish(3, store=faulty(bench.store, at, "refused", forever=True))
    assert find_newest(bench.store).commit.step == 2
    assert bench.store.get(old.save.slot.commit_key) is not None


def test_CK39_the_local_copy_outlives_a_failed_publication(bench: Any, faulty: Any) -> None:
    save, sealed = bench.save(7), bench.sealed({"a": b"weights"})
    with pytest.raises(StorageError):
        publish(faulty(bench.store, 0, "refused"), save, sealed, node=0, leader=True, gather=lambda it: [it])
    assert (sealed / "a").read_bytes() == b"weights"
    again = publish(bench.store, bench.save(7), sealed, node=0, leader=True, gather=lambda it: [it])
    assert again.won
