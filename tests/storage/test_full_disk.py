"""A disk that fills up in a fetch or in a save: one clear error, nothing half-written, and a way on."""

from __future__ import annotations

import os
import resource
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.base import Copy
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.engines.auto import EngineTransfer
from sm_llm.storage.engines.common import DiskError
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.folder import FolderStore
from sm_llm.storage.publication.publish import fetch, find_newest
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.syncing.sync import sync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
ENGINES = ("s5cmd", "crt", "boto3", "ranges")
FULL_MESSAGES = r"(?i)disk full|no space left|out of space|file too large"


@dataclass
class SmallDisk:
    """A folder that takes about 8 MiB, until ``enlarge``."""

    folder: Path
    mounted: bool

    def enlarge(self) -> None:
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", str(self.folder)], check=True)
        else:
            _limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of 8 MiB; where none may be mounted, files may not grow beyond that, which ends writes likewise."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    disk = SmallDisk(folder, mounted)
    if not mounted:
        _limit_files(8 * MIB)
    yield disk
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)
    else:
        disk.enlarge()


@pytest.fixture
def no_room_in_files() -> Iterator[None]:
    """What a quota does: no file grows beyond 8 MiB, though the disk has room."""
    _limit_files(8 * MIB)
    yield
    _limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])


@pytest.fixture
def store(s3_server: Any, bucket: str) -> S3Store:
    """A store with one object of 12 MiB."""
    store = S3Store(bucket, "data", S3Options(endpoint_url=s3_server.endpoint))
    store.client.put_object(**store.at("large"), Body=BODY, ChecksumAlgorithm="CRC64NVME")
    return store


BODY = os.urandom(12 * MIB)


def transfer_of(engine: str) -> Any:
    return RangesTransfer() if engine == "ranges" else EngineTransfer(engine)


def names(folder: Path) -> list[str]:
    return sorted(it.relative_to(folder).as_posix() for it in folder.rglob("*") if it.is_file())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_that_fills_up_in_a_fetch_is_reported_once_and_holds_nothing_under_a_final_name(
    store: S3Store, small_disk: SmallDisk, engine: str
) -> None:
    output: list[str] = []
    transfer = RangesTransfer() if engine == "ranges" else EngineTransfer(engine, announce=output.append)
    copy = Copy("large", small_disk.folder / "large.part", len(BODY), crc64_bytes(BODY))
    with pytest.raises(DiskError, match=FULL_MESSAGES):
        transfer.download(store, [copy], lambda _: None)
    assert not [line for line in output if "continues" in line], "it is not tried again on the same disk"
    assert "large" not in names(small_disk.folder)


@pytest.mark.integration
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("no_room_in_files")
def test_a_quota_that_is_used_up_is_reported_like_a_full_disk(store: S3Store, tmp_path: Path, engine: str) -> None:
    copy = Copy("large", tmp_path / "large.part", len(BODY), crc64_bytes(BODY))
    with pytest.raises(DiskError, match=FULL_MESSAGES):
        transfer_of(engine).download(store, [copy], lambda _: None)


def test_a_fetch_that_found_the_disk_full_continues_once_there_is_room(s3_bench: Any, small_disk: SmallDisk) -> None:
    commit = s3_bench.publish(1, {"a.bin": BODY[: 5 * MIB], "b.bin": BODY[: 6 * MIB]}).commit
    target = small_disk.folder / "restored"
    with pytest.raises(StorageError, match=FULL_MESSAGES):
        fetch(s3_bench.store, commit, target, transfer=RangesTransfer(workers=1))
    assert not [name for name in names(target) if not name.endswith((".part", ".ranges"))]
    small_disk.enlarge()
    fetch(s3_bench.store, commit, target)
    assert names(target) == ["a.bin", "b.bin"]


def test_a_sync_states_before_it_begins_what_will_not_fit(store: S3Store, small_disk: SmallDisk) -> None:
    if not small_disk.mounted:  # a limit of files is seen only when it is met
        small_disk.folder = small_disk.folder / "with-a-limit"
    with pytest.raises(StorageError, match=FULL_MESSAGES + r"|only [\d,]+ are free on this disk\. Nothing was fetched"):
        sync(store.uri, small_disk.folder, options=store.options)
    assert names(small_disk.folder) == []


def test_CK34_a_disk_that_fills_up_in_a_save_leaves_the_checkpoint_before_and_nothing_of_the_new(
    bench: Any, small_disk: SmallDisk
) -> None:
    bench.root = small_disk.folder
    bench.publish(1)
    before = names(bench.root)
    with pytest.raises(StorageError, match=FULL_MESSAGES):
        bench.publish(2, {"a.bin": BODY[: 3 * MIB], "large.bin": BODY})
    assert find_newest(FolderStore(bench.root)).commit.step == 1
    assert names(bench.root) == before
    small_disk.enlarge()
    assert bench.publish(2, {"large.bin": BODY}).won


def test_a_disk_full_to_the_last_byte_cannot_hold_half_a_commit(bench: Any, small_disk: SmallDisk) -> None:
    if not small_disk.mounted:
        _limit_files(100)
    bench.root = small_disk.folder
    store = bench.store
    if small_disk.mounted:
        with pytest.raises(OSError, match="No space left"):
            (small_disk.folder / "filler").write_bytes(bytes(9 * MIB))
    with pytest.raises(StorageError, match=FULL_MESSAGES):
        store.put_if_absent("ckpt/commits/step-00000001.json", bytes(9000))
    assert store.get("ckpt/commits/step-00000001.json") is None
    assert [name for name in names(small_disk.folder) if name != "filler"] == []
