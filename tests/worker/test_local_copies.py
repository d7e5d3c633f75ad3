"""Checkpoints that stay on a node's disk: what a restart believes of them, and how many there are."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import job_environment, job_file, train_task

from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication import publish as publication
from sm_llm.worker.checkpoint.checkpoint_restore import Fetcher
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.transfer.local_copies import LocalCopies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.storage.publication.publish import CommitManifest

FILES = {".metadata": b"m" * 10, "__0_0.distcp": b"weights" * 1000, "rank-00000.json": b"{}"}


@pytest.fixture
def context(tmp_path: Path) -> Iterator[WorkerContext]:
    environ = job_environment(job_file(train_task(), tmp_path / "run", 1))
    made = WorkerContext.read({**environ, "RANK": "0", "WORLD_SIZE": "1"})
    made.agent = SimpleNamespace(call=lambda action, *args, **how: action(*args, **how), end=lambda: None)  # type: ignore[assignment]
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "store").mkdir()
    return FolderStore(tmp_path / "store")


def published(context: WorkerContext, store: Any, step: int) -> tuple[CommitManifest, Path]:
    """A committed save of ``step``, and its sealed folder."""
    save = publication.new_save("run", step, world_size=1, node_count=1)
    sealed = context.copies.sealed(save.save_id)
    sealed.mkdir(parents=True)
    for name, body in FILES.items():
        (sealed / name).write_bytes(body + b"%d" % step)
    found = publication.publish(store, save, sealed, node=0, leader=True, gather=lambda it: [it])
    assert found.commit is not None
    return found.commit, sealed


def brought(context: WorkerContext, store: Any, commit: CommitManifest) -> Fetcher:
    fetcher = Fetcher(context, store)
    fetcher(commit, context.copies.folder / commit.save_id)
    for name, body in FILES.items():
        assert (context.copies.folder / commit.save_id / name).read_bytes() == body + b"%d" % (commit.step or 0)
    return fetcher


def test_what_a_node_has_kept_is_not_fetched(context: WorkerContext, store: Any) -> None:
    commit, sealed = published(context, store, 7)
    context.copies.keep(sealed, commit.save_id)
    shutil.rmtree(store.root / "ckpt" / "step-00000007")
    found = brought(context, store, commit)
    assert (found.local_bytes, found.fetched_bytes) == (commit.size, 0)


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_only_what_is_right_counts_and_the_rest_comes_from_the_store(
    context: WorkerContext, store: Any, damage: str
) -> None:
    commit, sealed = published(context, store, 7)
    context.copies.keep(sealed, commit.save_id)
    large = context.copies.folder / commit.save_id / "__0_0.distcp"
    body = bytearray(large.read_bytes())
    size = len(body)
    body[100] ^= 1
    large.unlink()
    if damage != "gone":
        large.write_bytes(bytes(body) if damage == "flipped" else bytes(body[:-1]))
    found = brought(context, store, commit)
    assert (found.local_bytes, found.fetched_bytes) == (commit.size - size, size)


def test_what_a_killed_attempt_had_sealed_is_adopted_and_the_rest_removed(context: WorkerContext, store: Any) -> None:
    """Killed between its commit and the end of its save."""
    commit, _ = published(context, store, 7)
    _, other = published(context, store, 8)
    half = context.copies.saving / "half"
    half.mkdir()
    context.copies.adopt()
    assert not half.exists()
    assert not other.exists()
    assert brought(context, store, commit).fetched_bytes == 0
    assert [it.name for it in context.copies.folder.iterdir() if it.is_dir()] == [commit.save_id]


def test_one_copy_is_kept_the_newest(context: WorkerContext, store: Any) -> None:
    for step in (1, 2, 3):
        commit, sealed = published(context, store, step)
        context.copies.keep(sealed, commit.save_id)
        assert [it.name for it in context.copies.folder.iterdir()] == [commit.save_id]


def test_the_copy_goes_where_the_next_saves_need_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = LocalCopies(tmp_path)
    kept = copies.folder / "id"
    kept.mkdir(parents=True)
    (kept / "x").write_bytes(b"x" * 1000)
    for free, stays in ((2000, True), (1999, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        copies.make_room()
        assert kept.exists() == stays


def test_a_copy_that_goes_while_it_is_measured_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that publishes removes the copy before the newest; the save beside it failed, and the training."""
    copies = LocalCopies(tmp_path)
    kept = copies.folder / "save"
    kept.mkdir(parents=True)
    (kept / "x").write_bytes(b"x")
    listed = Path.rglob

    def gone(self: Path, pattern: str) -> list[Path]:
        found = list(listed(self, pattern))
        shutil.rmtree(self)
        monkeypatch.setattr(Path, "is_file", lambda _: True)
        return found

    monkeypatch.setattr(Path, "rglob", gone)
    copies.make_room()
    assert not kept.exists()
