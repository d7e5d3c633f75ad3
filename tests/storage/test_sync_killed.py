"""Syncs that were killed: the next one continues from what they left, and none of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.engines import ranges
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.syncing.sync import sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
LARGE = 3 * MIB
FAST = 10**9
"""A bandwidth that limits nothing, but lets our own ranges do the work."""


def tree(folder: Path) -> dict[str, int]:
    """Files by size, and empty folders."""
    found = {it.relative_to(folder).as_posix(): it for it in folder.rglob("*")}
    return {name: it.stat().st_size for name, it in found.items() if it.is_file() or not list(it.iterdir())}


@pytest.fixture
def source(bucket: str, s3_server: Any) -> Callable[..., str]:
    """Objects by name and content; returns their address."""

    def put(**bodies: bytes) -> str:
        for name, body in bodies.items():
            key = f"data/{name.replace('__', '/')}"
            s3_server.client.put_object(Bucket=bucket, Key=key, Body=body, ChecksumAlgorithm="CRC64NVME")
        return f"s3://{bucket}/data"

    return put


@pytest.fixture
def broken(
    source: Any, fault_proxy: Any, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path, dict[str, str]]:
    """A sync that broke off inside a file: its source, its target and how the store is reached."""
    monkeypatch.setattr(ranges, "RANGE_BYTES", MIB)
    monkeypatch.setattr(ranges, "_TRIES", 1)
    monkeypatch.setattr(ranges.RangesTransfer.__init__, "__defaults__", (None, 1))  # one after the other
    uri, options = source(sub__large=os.urandom(LARGE), small=b"small"), {"endpoint_url": fault_proxy.endpoint}
    fault_proxy.set(rule("GET .*large", "404", first=2, count=99))
    with pytest.raises(StorageError, match="does not exist"):
        sync(uri, tmp_path / "out", max_bandwidth=FAST, options=options)
    assert {"sub/large.sm_llm.part", "sub/large.sm_llm.part.ranges"} <= tree(tmp_path / "out").keys()
    fault_proxy.set()
    return uri, tmp_path / "out", options


def test_the_same_sync_continues_inside_the_file(broken: tuple[str, Path, dict[str, str]], fault_proxy: Any) -> None:
    uri, target, options = broken
    sync(uri, target, options=options)
    assert tree(target) == {"sub/large": LARGE, "small": 5}
    assert fault_proxy.bytes_sent < LARGE


def test_a_sync_that_leaves_the_file_out_removes_what_was_left_of_it(
    broken: tuple[str, Path, dict[str, str]],
) -> None:
    uri, target, options = broken
    (target / "mine.part").write_bytes(b"a file of the user's own")
    sync(uri, target, exclude=["sub"], options=options, dry_run=True)
    assert "sub/large.sm_llm.part" in tree(target), "it only looks"
    sync(uri, target, exclude=["sub"], options=options)
    assert tree(target) == {"small": 5, "mine.part": 24}


@pytest.mark.parametrize("size", [5, LARGE, 4 * MIB])
def test_of_a_source_that_changed_nothing_old_is_used(
    broken: tuple[str, Path, dict[str, str]], source: Any, size: int
) -> None:
    uri, target, options = broken
    body = os.urandom(size)
    source(sub__large=body)
    sync(uri, target, options=options)
    assert tree(target) == {"sub/large": size, "small": 5}
    assert (target / "sub" / "large").read_bytes() == body


def test_of_a_source_that_lost_the_file_nothing_is_left(
    broken: tuple[str, Path, dict[str, str]], bucket: str, s3_server: Any
) -> None:
    uri, target, options = broken
    s3_server.client.delete_object(Bucket=bucket, Key="data/sub/large")
    sync(uri, target, options=options)
    assert tree(target) == {"small": 5}


def test_what_another_sync_is_fetching_is_left_to_it(
    broken: tuple[str, Path, dict[str, str]],
) -> None:
    uri, target, options = broken
    other: list[Any] = []

    def meanwhile(done: int, total: int) -> None:
        if not other:
            other.append(sync(uri, target, exclude=["sub"], options=options))
            assert "sub/large.sm_llm.part" in tree(target)

    sync(uri, target, options=options, progress=meanwhile)
    assert tree(target) == {"sub/large": LARGE, "small": 5}


@pytest.mark.integration
@pytest.mark.parametrize("engine", ["s5cmd", "crt", "boto3"])
def test_a_SIGKILL_takes_the_engine_along_and_the_next_sync_clears_up(
    source: Any, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str
) -> None:
    uri, target = source(sub__large=os.urandom(60 * MIB), small=b"small"), tmp_path / "out"
    fault_proxy.set(rule("GET .*large", "slow", count=10**6, seconds=0.02))
    argv = [sys.executable, "-m", "sm_llm.cli", "sync", uri, str(target), "--engine", engine]
    child = subprocess.Popen(
        [*argv, "--endpoint-url", fault_proxy.endpoint], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while fault_proxy.bytes_sent < MIB:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    options = {"endpoint_url": fault_proxy.endpoint}
    fault_proxy.set()
    sync(uri, target, exclude=["sub"], options=options)
    assert tree(target) == {"small": 5}
    sync(uri, target, options=options)
    assert tree(target) == {"sub/large": 60 * MIB, "small": 5}


def test_A13_19_no_file_of_the_users_is_taken_for_one_in_the_making(s3_bench: Any, tmp_path: Path) -> None:
    for name in ("x", "x.part"):
        s3_bench.store.put_if_absent(f"data/{name}", name.encode())
    target = tmp_path / "out"
    target.mkdir()
    mine = {"y.part": b"mine", "x.part": b"x.part", "x.part.backup1": b"mine", "z.part.aB3dE6f8": b"mine"}
    for name, body in mine.items():
        (target / name).write_bytes(body)
    sync(f"{s3_bench.store.uri}/data", target, options=S3Options(endpoint_url=s3_bench.endpoint))
    assert {it.name: it.read_bytes() for it in target.iterdir()} == {**mine, "x": b"x"}
    s3_bench.store.put_if_absent("data/x.sm_llm.part", b"x")
    with pytest.raises(StorageError, match="of a file in the making"):
        sync(f"{s3_bench.store.uri}/data", target, options=S3Options(endpoint_url=s3_bench.endpoint))


def test_A13_24_files_of_git_are_not_brought(s3_bench: Any, tmp_path: Path) -> None:
    for name in ("x", ".git/config"):
        s3_bench.store.put_if_absent(f"data/{name}", b"x")
    options = S3Options(endpoint_url=s3_bench.endpoint)
    with pytest.raises(StorageError, match="whose files are programs"):
        sync(f"{s3_bench.store.uri}/data", tmp_path / "out", options=options)
    sync(f"{s3_bench.store.uri}/data", tmp_path / "out", options=options, exclude=[".git/"])
    assert [it.name for it in (tmp_path / "out").iterdir()] == ["x"]
