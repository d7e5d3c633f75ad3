"""Restoring: verified bytes, the same checkpoint on every node, falling back together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.publication.publish import fetch, restore
from sm_llm.storage.transfer import CopyTransfer

if TYPE_CHECKING:
    from pathlib import Path


class Mishap(CopyTransfer):
    """An engine that spoils what it fetched, ``times`` times."""

    def __init__(self, times: int, spoil: Any) -> None:
        super().__init__(workers=1)
        self.times, self.spoil, self.fetched = times, spoil, 0

    def download(self, store: Any, copies: Any, progress: Any) -> dict[str, str]:
        reported = super().download(store, copies, progress)
        self.fetched += len(copies)
        if self.times:
            self.times -= 1
            self.spoil([it.path for it in copies])
        return reported


def cut(paths: list[Path]) -> None:
    paths[0].write_bytes(paths[0].read_bytes()[:-1])


def flip(paths: list[Path]) -> None:
    body = bytearray(paths[0].read_bytes())
    body[len(body) // 2] ^= 1
    paths[0].write_bytes(body)


def swap(paths: list[Path]) -> None:
    first, second = (it.read_bytes() for it in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


def files_below(folder: Path) -> dict[str, bytes]:
    return {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def test_what_comes_back_is_what_went_in(bench: Any, contents: Any, tmp_path: Path) -> None:
    commit = bench.publish(10).commit
    moved: list[int] = []
    assert fetch(bench.store, commit, tmp_path / "out", progress=moved.append) == tmp_path / "out"
    assert files_below(tmp_path / "out") == contents(10)
    assert sum(moved) == commit.size


def test_only_what_is_wanted_comes(bench: Any, tmp_path: Path) -> None:
    fetch(bench.store, bench.publish(10).commit, tmp_path / "out", select=lambda it: it.path.startswith("model/"))
    assert list(files_below(tmp_path / "out")) == ["model/a.bin"]


def test_what_is_there_and_right_is_not_fetched_again(bench: Any, contents: Any, tmp_path: Path) -> None:
    commit = bench.publish(10).commit
    fetch(bench.store, commit, tmp_path / "out")
    (tmp_path / "out" / "b.bin").write_bytes(b"same size?".ljust(len(contents(10)["b.bin"])))
    engine, moved = Mishap(0, cut), []
    fetch(bench.store, commit, tmp_path / "out", transfer=engine, progress=moved.append)
    assert engine.fetched == 1
    assert files_below(tmp_path / "out") == contents(10)
    assert sum(moved) == commit.size


@pytest.mark.parametrize("spoil", [cut, flip, swap])
def test_what_arrives_wrong_is_fetched_again(bench: Any, contents: Any, tmp_path: Path, spoil: Any) -> None:
    fetch(bench.store, bench.publish(10).commit, tmp_path / "out", transfer=Mishap(2, spoil))
    assert files_below(tmp_path / "out") == contents(10)


def test_what_stays_wrong_is_refused_and_never_gets_its_name(bench: Any, tmp_path: Path) -> None:
    engine = Mishap(9, flip)
    with pytest.raises(CheckpointError, match=r"step 10: 'b\.bin' has other content"):
        fetch(bench.store, bench.publish(10).commit, tmp_path / "out", transfer=engine)
    assert not (tmp_path / "out" / "b.bin").exists()
    assert engine.fetched == 2 + 1 + 1


def test_a_half_fetched_file_of_a_killed_process_does_no_harm(bench: Any, contents: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.bin.sm_llm.part").write_bytes(b"half")
    fetch(bench.store, bench.publish(10).commit, tmp_path / "out")
    assert files_below(tmp_path / "out") == contents(10)


def everywhere(bench: Any, together: Any, target: Path, store_of: Any = None, **options: Any) -> list[Any]:
    """Restore on 2 nodes with 2 processes each."""

    def run(rank: int, gather: Any) -> Any:
        return restore(
            store_of(rank) if store_of else bench.store,
            target / f"node-{rank // 2}",
            run_id=bench.run_id,
            leader=rank == 0,
            fetches=rank % 2 == 0,
            gather=gather,
            **options,
        )

    return together(4, run)


def test_all_nodes_restore_the_same_checkpoint(bench: Any, together: Any, contents: Any, tmp_path: Path) -> None:
    for step in (10, 20):
        bench.publish(step)
    results = everywhere(bench, together, tmp_path)
    assert {it.commit.step for it in results} == {20}
    assert [files_below(results[rank].folder) for rank in (0, 2)] == [contents(20)] * 2
    assert all(it.rejected == () for it in results)


def test_a_run_without_checkpoints_starts_anew_on_all(bench: Any, together: Any, tmp_path: Path) -> None:
    assert everywhere(bench, together, tmp_path) == [None] * 4


@pytest.mark.parametrize("how", ["truncated", "missing", "altered", "swapped"])
def test_damage_seen_by_any_node_takes_all_to_the_one_before(
    bench: Any, together: Any, contents: Any, tmp_path: Path, how: str
) -> None:
    for step in (10, 20):
        published = bench.publish(step)
    path, other = bench.data(published, "b.bin"), bench.data(published, "model/a.bin")
    body = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": body[:-1], "altered": body[:-1] + b"!", "swapped": other.read_bytes()}[how])
    if how == "swapped":
        other.write_bytes(body)
    results = everywhere(bench, together, tmp_path)
    assert {it.commit.step for it in results} == {10}
    assert [[it.step for it in result.rejected] for result in results] == [[20]] * 4
    assert "b.bin" in str(results[0].rejected[0])
    assert files_below(results[2].folder) == contents(10)


def test_one_nodes_bad_disk_takes_all_to_the_one_before(bench: Any, together: Any, tmp_path: Path) -> None:
    for step in (10, 20):
        bench.publish(step)

    def run(rank: int, gather: Any) -> Any:
        return restore(
            bench.store,
            tmp_path / f"node-{rank}",
            run_id=bench.run_id,
            leader=rank == 0,
            fetches=True,
            gather=gather,
            bring=partial(fetch, bench.store, transfer=Mishap(3 if rank == 1 else 0, flip)),
        )

    results = together(2, run)
    assert [it.commit.step for it in results] == [10, 10]
    assert "process 1" in str(results[0].rejected[0])


def test_none_usable_is_an_error_on_all(bench: Any, together: Any, tmp_path: Path) -> None:
    for step in (10, 20):
        published = bench.publish(step)
        path = bench.data(published, "b.bin")
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    results = everywhere(bench, together, tmp_path)
    assert all(isinstance(it, CheckpointError) for it in results)
    assert "step 20" in str(results[3])
    assert "step 10" in str(results[3])


def test_a_storage_error_on_one_node_is_an_error_on_all(bench: Any, together: Any, faulty: Any, tmp_path: Path) -> None:
    bench.publish(10)
    for rank in (0, 2):
        results = everywhere(
            bench, together, tmp_path, lambda it, rank=rank: faulty(bench.store, 0 if it == rank else -1, "refused")
        )
        assert [str(it) for it in results] == [str(results[0])] * 4
        assert isinstance(results[1], StorageError)
