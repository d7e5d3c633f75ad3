"""The folder store keeps the promises of a Store."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.base import Copy, MissingObjectError
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.transfer import CopyTransfer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    (tmp_path / "store").mkdir()
    return FolderStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3_000_000))
    return path


def test_the_first_writer_wins_and_its_body_stays(store: FolderStore) -> None:
    assert store.put_if_absent("a/b/key.json", b"first") is True
    assert store.put_if_absent("a/b/key.json", b"second") is False
    assert store.get("a/b/key.json") == b"first"
    assert [it.key for it in store.list("")] == ["a/b/key.json"]


def test_a_store_holds_what_is_below_a_prefix_and_no_empty_folder(store: FolderStore) -> None:
    (store.root / "empty" / "below").mkdir(parents=True)
    assert not store.holds()
    assert store.put_if_absent("a/b/key.json", b"first")
    assert [store.holds(it) for it in ("", "a/", "a/b/k", "b", "empty/", "a/b/x", "no/such/")] == [True] * 3 + [
        False
    ] * 4
    with pytest.raises(StorageError, match="does not exist"):
        FolderStore(store.root / "gone").holds()


def test_of_racing_writers_exactly_one_wins(store: FolderStore) -> None:
    for race in range(20):
        barrier = threading.Barrier(6)
        won: list[bytes] = []

        def write(body: bytes, key: str = f"race/{race}", start: threading.Barrier = barrier) -> None:
            start.wait()
            if store.put_if_absent(key, body):
                won.append(body)  # noqa: B023

        threads = [threading.Thread(target=write, args=(b"%d" % number * 5000,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(f"race/{race}") == won[0]


def test_files_go_in_and_out_unchanged(store: FolderStore, source: Path, tmp_path: Path) -> None:
    stored = store.put_file(source, "data/x.bin")
    assert (stored.size, stored.crc64nvme) == (3_000_000, crc64_bytes(source.read_bytes()))
    assert store.checksum("data/x.bin") == stored.crc64nvme
    head = store.head("data/x.bin")
    assert head is not None
    assert head.size == 3_000_000
    store.get_file("data/x.bin", tmp_path / "out" / "x.bin")
    assert (tmp_path / "out" / "x.bin").read_bytes() == source.read_bytes()
    assert [it.name for it in (tmp_path / "out").iterdir()] == ["x.bin"]


def test_a_key_is_never_written_twice(store: FolderStore, source: Path) -> None:
    store.put_file(source, "data/x.bin")
    with pytest.raises(StorageError, match=r"cannot write 'data/x\.bin'"):
        store.put_file(source, "data/x.bin")
    assert store.checksum("data/x.bin") == crc64_bytes(source.read_bytes())


def test_other_bytes_on_disk_are_noticed(store: FolderStore, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm_llm.storage.folder.crc64_file", lambda *_, **__: "0" * 16)
    with pytest.raises(StorageError, match="reads back other bytes"):
        store.put_file(source, "data/x.bin")


def test_what_is_missing_is_a_value_or_a_missing_object(store: FolderStore, tmp_path: Path) -> None:
    assert store.get("none") is None
    assert store.head("none") is None
    assert store.list("none/") == []
    store.delete(["none", "no/folder/either"])
    for ask in (lambda: store.get_file("none", tmp_path / "x"), lambda: store.checksum("none")):
        with pytest.raises(MissingObjectError, match="'none' does not exist"):
            ask()


def test_a_missing_root_is_an_error_not_emptiness(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "unmounted")
    for ask in (
        lambda: store.list(""),
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.delete(["a"]),
        lambda: store.get_file("a", tmp_path / "x"),
    ):
        with pytest.raises(StorageError, match="does not exist") as caught:
            ask()
        assert not isinstance(caught.value, MissingObjectError)


def test_CK03_a_prefix_that_is_a_folder_keeps_other_runs_out(store: FolderStore) -> None:
    for key in ("run-1/a", "run-1/b/c", "run-10/a", "run-1.txt"):
        store.put_if_absent(key, b"x")
    assert [it.key for it in store.list("run-1/")] == ["run-1/a", "run-1/b/c"]


def test_CK04_names_are_the_same_wherever_they_come_from(store: FolderStore, tmp_path: Path) -> None:
    for key in ("data/train/a.csv", "data/train/b/c.csv", "data/train-data.csv"):
        store.put_if_absent(key, key.encode())
    prefix = "data/train/"
    listed = store.list(prefix)
    copies = [Copy(it.key, tmp_path / "local" / it.key.removeprefix(prefix), it.size, "") for it in listed]
    CopyTransfer().download(store, copies, lambda _: None)
    local = sorted(it.relative_to(tmp_path / "local").as_posix() for it in (tmp_path / "local").rglob("*.csv"))
    assert local == ["a.csv", "b/c.csv"]


def test_a_bare_prefix_matches_as_text_like_s3(store: FolderStore) -> None:
    for key in ("ckpt/step-1/a", "ckpt/step-10/a", "ckpt/other"):
        store.put_if_absent(key, b"x")
    assert [it.key for it in store.list("ckpt/step-1")] == ["ckpt/step-1/a", "ckpt/step-10/a"]


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/../b", "./a", "a/", "a\0b", ".tmp/a"])
def test_keys_that_could_leave_the_root_are_refused(store: FolderStore, key: str) -> None:
    with pytest.raises(StorageError, match="cannot be the name of a file"):
        store.put_if_absent(key, b"x")


def test_odd_names_survive(store: FolderStore, source: Path) -> None:
    names = ["ü mit Leerzeichen.bin", "a+b%20c&d=e.bin", "日本.bin", "trailing .bin"]
    for name in names:
        store.put_file(source, f"data/{name}")
    assert sorted(it.key for it in store.list("data/")) == sorted(f"data/{name}" for name in names)


def test_delete_leaves_no_empty_folders(store: FolderStore) -> None:
    for key in ("a/b/c/1", "a/b/c/2", "a/d"):
        store.put_if_absent(key, b"x")
    store.delete(["a/b/c/1", "a/b/c/2"])
    assert not (store.root / "a/b").exists()
    assert [it.key for it in store.list("")] == ["a/d"]


def test_writing_survives_a_folder_pruned_under_it(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link, pruned = os.link, []

    def prune_first(source: Path, target: Path) -> None:
        if len(pruned) < 2:
            pruned.append(target)
            target.parent.rmdir()
        link(source, target)

    monkeypatch.setattr(os, "link", prune_first)
    assert store.put_if_absent("shared/key", b"x") is True
    assert len(pruned) == 2
    assert store.get("shared/key") == b"x"


def test_a_full_disk_is_named_and_leaves_no_half_copy(
    store: FolderStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write 'data/x\.bin': disk full"):
        store.put_file(source, "data/x.bin")
    assert not (store.root / "data/x.bin").exists()


def test_a_file_system_without_hard_links_is_explained(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StorageError, match="has no hard links"):
        store.put_if_absent("a", b"x")
    assert store.list("") == []


def test_a_folder_that_cannot_be_listed_is_an_error(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(StorageError, match=r"cannot list 'ckpt/': .*Stale file handle"):
        store.list("ckpt/")


def test_a_transfer_keeps_order_and_raises_the_first_error(store: FolderStore, source: Path, tmp_path: Path) -> None:
    copies = [Copy(f"data/{number}", source, 3_000_000, "") for number in range(6)]
    moved: list[int] = []
    stored = CopyTransfer(workers=3).upload(store, copies, moved.append)
    assert [it.key for it in stored] == [it.key for it in copies]
    assert moved == [3_000_000] * 6
    missing = Copy("data/none", tmp_path / "none", 1, "")
    with pytest.raises(MissingObjectError, match="data/none"):
        CopyTransfer(workers=3).download(store, [missing], moved.append)
