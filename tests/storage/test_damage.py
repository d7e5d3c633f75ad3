"""Bytes that are wrong on the wire, in the store or on disk: caught and repaired with every engine."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.engines import ranges
from sm_llm.storage.engines.auto import EngineTransfer
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.publication.publish import fetch, find_newest, restore
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.syncing.sync import sync

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
ENGINES = ("s5cmd", "crt", "boto3", "ranges")
SHARDS = ("shard-0.bin", "shard-1.bin")


@pytest.fixture(autouse=True)
def _small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", 4 * MIB)


def by(engine: str) -> dict[str, Any]:
    """How a test chooses the engine of a download."""
    return {"max_bandwidth": 1 << 40} if engine == "ranges" else {"engine": engine}


def transfer_of(engine: str) -> Any:
    return RangesTransfer() if engine == "ranges" else EngineTransfer(engine)


def tree(folder: Path) -> dict[str, bytes]:
    return {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


@pytest.mark.parametrize(
    ("engine", "size", "action"),
    [
        *((engine, 9 * MIB, "flip") for engine in ENGINES),
        ("s5cmd", 9 * MIB, "cut"),
        ("ranges", 9 * MIB, "cut"),
        *(pytest.param(engine, 18 * MIB, "cut", marks=pytest.mark.integration) for engine in ("crt", "boto3", "auto")),
        *(pytest.param("s5cmd", 18 * MIB, action, marks=pytest.mark.integration) for action in ("flip", "cut")),
    ],
)
@pytest.mark.usefixtures("small_parts")
def test_I9_a_flipped_bit_and_a_truncated_body_are_caught_and_repaired_with_every_engine(
    fault_proxy: Any, rule: Any, tmp_path: Path, bucket: str, engine: str, size: int, action: str
) -> None:
    body = os.urandom(size)
    far = S3Store(bucket, "data", S3Options(endpoint_url=fault_proxy.endpoint))
    (tmp_path / "in").write_bytes(body)
    far.put_file(tmp_path / "in", "large")
    fault_proxy.set(rule("GET /.*/data/large", action))
    report = sync(f"s3://{bucket}/data", tmp_path / "out", options=far.options, **by(engine))
    assert fault_proxy.rules[0].seen > 1, "it was fetched again"
    assert tree(tmp_path / "out") == {"large": body}
    assert (report.copied, report.unverified) == (["large"], [])


@pytest.mark.parametrize("engine", ENGINES)
def test_I1_a_file_that_stays_wrong_is_an_error_and_never_gets_its_name(
    fault_proxy: Any, rule: Any, tmp_path: Path, bucket: str, engine: str
) -> None:
    far = S3Store(bucket, "data", S3Options(endpoint_url=fault_proxy.endpoint))
    far.client.put_object(**far.at("small"), Body=os.urandom(1000), ChecksumAlgorithm="CRC64NVME")
    fault_proxy.set(rule("GET /.*/data/small", "flip", count=1000))
    with pytest.raises(StorageError, match=r"arrives with other content|arrives damaged: "):
        sync(f"s3://{bucket}/data", tmp_path / "out", options=far.options, **by(engine))
    assert not (tmp_path / "out" / "small").exists()


@pytest.mark.parametrize("engine", ENGINES)
def test_I1_two_shards_swapped_in_the_store_are_caught_and_the_checkpoint_before_comes(
    s3_bench: Any, tmp_path: Path, engine: str
) -> None:
    before, body = ({name: os.urandom(5000) for name in SHARDS} for _ in range(2))
    s3_bench.publish(1, before)
    commit = s3_bench.publish(2, body).commit
    store, prefix = s3_bench.store, commit.save.data_prefix
    for mine, other in zip(SHARDS, reversed(SHARDS), strict=True):
        store.client.put_object(**store.at(prefix + mine), Body=body[other], ChecksumAlgorithm="CRC64NVME")
    assert find_newest(store).commit == commit, "names and sizes are as they were"
    with pytest.raises(CheckpointError, match="other content than was published"):
        fetch(store, commit, tmp_path / "out", transfer=transfer_of(engine))
    assert tree(tmp_path / "out") == {}
    restored = restore(
        store,
        tmp_path / "restored",
        run_id=s3_bench.run_id,
        leader=True,
        fetches=True,
        gather=lambda it: [it],
        bring=partial(fetch, store, transfer=transfer_of(engine)),
    )
    assert restored is not None
    assert tree(restored.folder) == before


@pytest.mark.integration
@pytest.mark.parametrize(
    ("engine", "action"),
    [*((engine, "flip") for engine in ("auto", *ENGINES)), ("auto", "replace"), ("auto", "longer")],
)
def test_I1_data_that_never_arrive_right_take_the_restore_to_the_step_before_with_the_reason(
    s3_bench: Any, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str, action: str
) -> None:
    """Also where an engine notices it first, or a page comes in place of the data."""
    before, body = ({name: os.urandom(5000) for name in SHARDS} for _ in range(2))
    s3_bench.publish(1, before)
    prefix = s3_bench.publish(2, body).commit.save.data_prefix
    s3_bench.endpoint = fault_proxy.endpoint
    page = b"<html>Please log in</html>" if action == "replace" else b"x" * 9000
    spoil = "flip" if action == "flip" else "replace"
    fault_proxy.set(rule(f"GET /.*/{prefix}{SHARDS[1]}", spoil, count=10**6, body=page))
    restored = restore(
        s3_bench.store,
        tmp_path / "restored",
        run_id=s3_bench.run_id,
        leader=True,
        fetches=True,
        gather=lambda it: [it],
        bring=partial(fetch, s3_bench.store, transfer=transfer_of(engine)),
    )
    assert restored is not None
    assert restored.commit.step == 1
    assert tree(restored.folder) == before
    (rejected,) = restored.rejected
    assert rejected.step == 2
    assert SHARDS[1] in rejected.reason


@pytest.mark.parametrize("engine", ENGINES)
def test_I9_shards_swapped_or_altered_on_disk_are_caught_and_repaired_whatever_their_size_and_time(
    s3_bench: Any, tmp_path: Path, engine: str
) -> None:
    body = {name: os.urandom(5000) for name in SHARDS}
    commit = s3_bench.publish(1, body).commit
    target = fetch(s3_bench.store, commit, tmp_path / "out", transfer=transfer_of(engine))
    first, second = (target / name for name in SHARDS)
    first.rename(target / "aside")
    second.rename(first)
    (target / "aside").rename(second)
    fetch(s3_bench.store, commit, target, transfer=transfer_of(engine))
    assert tree(target) == body
    first.write_bytes(bytes(5000))
    os.utime(first, (1, 1))
    fetch(s3_bench.store, commit, target, transfer=transfer_of(engine))
    assert tree(target) == body
