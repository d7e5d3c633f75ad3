"""Sync: between folders and S3, compared by content, verified on disk, continued after a break."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.errors import StorageError
from sm_llm.launcher.tools.sync_command import report_lines
from sm_llm.storage.syncing.sync import sync

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

ODD = {"two words.bin": 10, "a$b.txt": 20, "sub/ü.bin": 0, "sub/per%20cent": 5, "model.safetensors": 9_000_000}


@pytest.fixture
def options(fault_proxy: Any) -> dict[str, str]:
    return {"endpoint_url": fault_proxy.endpoint}


@pytest.fixture
def uri(bucket: str) -> str:
    return f"s3://{bucket}/data/train"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, size in ODD.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {it.relative_to(folder).as_posix(): it.read_bytes() for it in folder.rglob("*") if it.is_file()}


def test_S303_there_and_back_every_byte_and_name_is_equal(
    source: Path, uri: str, options: dict[str, str], tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    report = sm_llm.sync(source, uri, options=options, progress=lambda done, total: seen.append((done, total)))
    assert sorted(report.copied) == sorted(ODD)
    assert report.copied_size == sum(ODD.values())
    assert seen[-1] == (report.copied_size, report.copied_size)
    assert report.engines == ["crt: 5 files, 9,000,035 bytes"]
    report = sync(uri, tmp_path / "back", options=options)
    assert tree(tmp_path / "back") == tree(source)
    assert report.unverified == []


def test_a_second_run_asks_once_and_moves_nothing(
    source: Path, uri: str, options: dict[str, str], tmp_path: Path, fault_proxy: Any
) -> None:
    sync(source, uri, options=options)
    sync(uri, tmp_path / "back", options=options)
    for start, end in ((source, uri), (uri, tmp_path / "back")):
        fault_proxy.set()
        report = sync(start, end, options=options)
        assert (report.copied, report.unchanged) == ([], len(ODD))
        assert len(fault_proxy.log) == 1
        assert "list-type=2" in fault_proxy.log[0]


def test_without_a_memory_it_compares_by_content(
    source: Path, uri: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault_proxy: Any
) -> None:
    sync(source, uri, options=options)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-cache"))
    fault_proxy.set()
    assert sync(source, uri, options=options).copied == []
    assert sync(uri, source, options=options).copied == []
    assert fault_proxy.count("^GET /[^?]*/data") == 0


@pytest.mark.parametrize(
    "engine",
    [{"engine": "s5cmd"}, {"engine": "crt"}, {"engine": "boto3"}, {"max_bandwidth": 1 << 40}],
    ids=["s5cmd", "crt", "boto3", "ranges"],
)
def test_a_changed_file_of_the_same_size_and_an_older_time_is_caught_with_every_engine(
    source: Path, uri: str, options: dict[str, str], tmp_path: Path, engine: dict[str, Any]
) -> None:
    back = tmp_path / "back"
    sync(source, uri, options=options, **engine)
    sync(uri, back, options=options, **engine)
    (back / "two words.bin").write_bytes(b"0123456789")
    os.utime(back / "two words.bin", (1, 1))
    assert sync(uri, back, options=options, **engine).copied == ["two words.bin"]
    assert tree(back) == tree(source)
    (source / "a$b.txt").write_bytes(b"x" * 20)
    os.utime(source / "a$b.txt", (1, 1))
    assert sync(source, uri, options=options, **engine).copied == ["a$b.txt"]
    assert sync(uri, back, options=options, **engine).copied == ["a$b.txt"]
    assert tree(back) == tree(source)


def test_S305_one_object_is_fetched_once(source: Path, uri: str, options: dict[str, str], tmp_path: Path) -> None:
    sync(source, uri, options=options)
    first = sync(f"{uri}/two words.bin", tmp_path / "out", options=options)
    again = sync(f"{uri}/two words.bin", tmp_path / "out", options=options)
    assert (first.copied, again.copied, again.unchanged) == (["two words.bin"], [], 1)
    assert sync(tmp_path / "out" / "two words.bin", f"{uri}-copy", options=options).copied == ["two words.bin"]


def test_CK03_CK04_a_prefix_is_a_folder_and_never_the_beginning_of_a_name(
    bucket: str, options: dict[str, str], s3_server: Any, tmp_path: Path
) -> None:
    for key in ("data/train-data.csv", "run-1/x", "run-10/x"):
        s3_server.client.put_object(Bucket=bucket, Key=key, Body=b"x")
    with pytest.raises(StorageError, match=r"holds nothing.*There are, for example: 'train-data\.csv'"):
        sync(f"s3://{bucket}/data/train", tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()
    assert sync(f"s3://{bucket}/run-1", tmp_path / "out", options=options).copied == ["x"]


@pytest.mark.parametrize("bad", ["s3://BUCKET/nothing/here", "EMPTY", "MISSING", "s3://BUCKET/*txt", "HERE/*.bin"])
def test_S307_an_empty_mistyped_or_wildcard_source_is_refused(
    bucket: str, options: dict[str, str], tmp_path: Path, bad: str
) -> None:
    (tmp_path / "empty").mkdir()
    locations = {
        "BUCKET": bucket,
        "EMPTY": str(tmp_path / "empty"),
        "MISSING": str(tmp_path / "no"),
        "HERE": str(tmp_path),
    }
    for word, location in locations.items():
        bad = bad.replace(word, location)
    with pytest.raises(StorageError, match=r"holds nothing|holds no file|does not exist|holds a wildcard"):
        sync(bad, f"s3://{bucket}/x" if "s3://" not in bad else tmp_path / "out", options=options)


@pytest.mark.parametrize("key", ["../up.txt", "a//b", "a/./b"])
def test_keys_that_are_no_paths_are_refused_before_anything_is_written(
    bucket: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    from sm_llm.storage.base import StoredObject
    from sm_llm.storage.s3_store import S3Store

    monkeypatch.setattr(S3Store, "list", lambda *_: [StoredObject(key, 1)])
    with pytest.raises(StorageError, match="cannot be the name of a file"):
        sync(f"s3://{bucket}/x", tmp_path / "out", options=options)
    monkeypatch.setattr(S3Store, "list", lambda *_: [StoredObject("d", 1), StoredObject("d/e", 1)])
    with pytest.raises(StorageError, match="'d' is an object and, for 'd/e', a folder"):
        sync(f"s3://{bucket}/x", tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


def test_free_disk_is_checked_first(
    source: Path, uri: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync(source, uri, options=options)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 8_000_000))
    with pytest.raises(StorageError, match="9,000,035 bytes are to be fetched, but only 8,000,000 are free"):
        sync(uri, tmp_path / "out", options=options)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_compares_and_moves_nothing(
    source: Path, uri: str, options: dict[str, str], fault_proxy: Any
) -> None:
    report = sync(source, uri, options=options, dry_run=True)
    assert len(report.copied) == len(ODD)
    assert fault_proxy.count("^PUT|^POST") == 0
    assert list(report_lines(report, dry_run=True)) == [f"would copy: 5 files, 8.6 MiB -> {uri}"]


def test_objects_without_our_checksum_are_verified_by_md5_or_named(
    bucket: str, options: dict[str, str], s3_server: Any, tmp_path: Path
) -> None:
    s3_server.client.put_object(Bucket=bucket, Key="x/md5", Body=b"one part")
    report = sync(f"s3://{bucket}/x", tmp_path / "out", options=options)
    assert (tmp_path / "out" / "md5").read_bytes() == b"one part"
    assert report.unverified == []
    (tmp_path / "out" / "md5").write_bytes(b"1234 678")
    assert sync(f"s3://{bucket}/x", tmp_path / "out", options=options).copied == ["md5"]
    client, location = s3_server.client, {"Bucket": bucket, "Key": "x/parts"}
    upload = client.create_multipart_upload(**location)["UploadId"]
    part = client.upload_part(**location, UploadId=upload, PartNumber=1, Body=b"no checksum kept")
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    client.complete_multipart_upload(**location, UploadId=upload, MultipartUpload=parts)
    report = sync(f"s3://{bucket}/x", tmp_path / "out", options=options)
    assert report.copied == ["parts"]
    assert report.unverified == (
        [] if client.head_object(**location, ChecksumMode="ENABLED").get("ChecksumCRC64NVME") else ["parts"]
    )


def test_folder_to_folder_and_what_is_not_a_place(source: Path, tmp_path: Path, bucket: str) -> None:
    assert len(sync(source, tmp_path / "copy").copied) == len(ODD)
    assert tree(tmp_path / "copy") == tree(source)
    assert sync(source, tmp_path / "copy").copied == []
    (source / "a$b.txt").write_bytes(b"y" * 20)
    assert sync(source, tmp_path / "copy").copied == ["a$b.txt"]
    with pytest.raises(StorageError, match="one of source and destination must be a folder"):
        sync(f"s3://{bucket}/a", f"s3://{bucket}/b")
    with pytest.raises(StorageError, match=r"is a file\. Name a folder"):
        sync(source, source / "a$b.txt")
    with pytest.raises(StorageError, match="must be at least 1 byte per second"):
        sync(source, tmp_path / "copy", max_bandwidth=0)


@pytest.mark.parametrize("engine", ["crt", "boto3", "s5cmd"])
def test_names_as_long_as_a_disk_takes_survive(uri: str, options: dict[str, str], tmp_path: Path, engine: str) -> None:
    (tmp_path / "in").mkdir()
    for name in ("n" * 255, "ü" * 127, "n" * 254 + "x"):
        (tmp_path / "in" / name).write_bytes(os.urandom(30))
    sync(tmp_path / "in", uri, options=options, engine=engine)
    sync(uri, tmp_path / "out", options=options, engine=engine)
    sync(tmp_path / "in", tmp_path / "copy")
    assert tree(tmp_path / "out") == tree(tmp_path / "copy") == tree(tmp_path / "in")


def test_a_file_to_a_place_of_its_own_name_is_asked_about(
    source: Path, uri: str, options: dict[str, str], tmp_path: Path
) -> None:
    file, target = source / "a$b.txt", tmp_path / "a$b.txt"
    with pytest.raises(StorageError, match=r"is taken for a folder, and 'a\$b\.txt' would be put into it"):
        sync(file, f"{uri}/a$b.txt", options=options)
    sync(file, f"{uri}/", options=options)
    with pytest.raises(StorageError, match="is taken for a folder"):
        sync(f"{uri}/a$b.txt", target, options=options)
    assert not target.exists()
    sync(f"{uri}/a$b.txt", f"{target}/", options=options)
    assert tree(target) == {"a$b.txt": file.read_bytes()}


def test_SR13_a_cache_of_links_is_stored_as_files(uri: str, options: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "sha").write_bytes(b"weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/sha")
    sync(tmp_path / "snapshot", uri, options=options)
    sync(uri, tmp_path / "back", options=options)
    assert tree(tmp_path / "back") == {"model.safetensors": b"weights"}
    assert not (tmp_path / "back" / "model.safetensors").is_symlink()


def test_a_file_that_changes_while_it_is_stored_is_reported(source: Path, uri: str, options: dict[str, str]) -> None:
    def touch(done: int, total: int) -> None:
        os.utime(source / "two words.bin", (5, 5))

    with pytest.raises(StorageError, match="changed while it was being stored"):
        sync(source, uri, options=options, progress=touch)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sm_llm.cli", *arguments]


def test_the_command_states_what_it_did(source: Path, uri: str, options: dict[str, str], tmp_path: Path) -> None:
    endpoint = ("--endpoint-url", options["endpoint_url"])
    run = subprocess.run(command("sync", str(source), uri, *endpoint, "--json"), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["copied"]) == len(ODD)
    run = subprocess.run(  # the user's defaults hold here, too
        command("sync", uri, str(tmp_path / "out"), "--exclude", "sub", "--bandwidth", "100MB"),
        capture_output=True,
        text=True,
        env={**os.environ, "SM_LLM_ENDPOINT_URL": options["endpoint_url"]},
    )
    assert "left out (exclude sub): 2 files, 5 B" in run.stdout
    assert "copied and verified: 3 files, 8.6 MiB" in run.stdout
    run = subprocess.run(command("sync", f"{uri}x", str(tmp_path), *endpoint), capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("error: source: ")


@pytest.mark.parametrize("engine", ["auto", "s5cmd", "boto3"])
def test_I10_SIGTERM_in_an_upload_ends_it_and_leaves_no_parts(
    bucket: str, options: dict[str, str], fault_proxy: Any, rule: Any, tmp_path: Path, s3_server: Any, engine: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "large").write_bytes(os.urandom((60 if engine == "s5cmd" else 20) << 20))
    fault_proxy.set(rule("PUT .*partNumber=2", "hang", count=999, seconds=1))
    location = ("--endpoint-url", options["endpoint_url"], "--engine", engine)
    argv = command("sync", str(tmp_path / "in"), f"s3://{bucket}/x", *location)
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not fault_proxy.count("partNumber=2"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, reported = child.communicate(timeout=240)
    assert b"interrupted; the same command continues" in reported
    assert child.returncode == 128 + signal.SIGTERM
    assert not s3_server.client.list_multipart_uploads(Bucket=bucket).get("Uploads")
    assert not s3_server.client.list_objects_v2(Bucket=bucket).get("Contents")


def test_doctor_reports_what_works_and_what_is_missing(bucket: str, s3_server: Any, tmp_path: Path) -> None:
    from sm_llm.storage.storage_probe import probe_storage

    options = {"endpoint_url": s3_server.endpoint}
    assert probe_storage(f"s3://{bucket}/runs", options).ok
    assert not s3_server.client.list_objects_v2(Bucket=bucket).get("Contents")
    assert probe_storage(tmp_path / "runs").ok
    report = probe_storage("s3://no-such-bucket/runs", options)
    assert not report.ok
    assert report.text().count("the bucket does not exist") == 1
    assert report.policy is None, "no permission creates a bucket"


def test_doctor_prints_the_policy_that_a_reader_lacks(
    bucket: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm_llm.storage.storage_probe import probe_storage
    from tests.fixtures.s3_server import READER_KEY, READER_SECRET

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    options = {"endpoint_url": s3_server.endpoint, "kms_key_id": "arn:aws:kms:eu-west-1:1:key/2"}
    report = probe_storage(f"s3://{bucket}/runs", options)
    assert report.policy is not None
    statements = {it["Resource"]: it["Action"] for it in report.policy["Statement"]}
    assert statements == {
        f"arn:aws:s3:::{bucket}/runs/*": [
            "s3:AbortMultipartUpload",
            "s3:DeleteObject",
            "s3:GetObject",
            "s3:PutObject",
        ],
        "arn:aws:kms:eu-west-1:1:key/2": ["kms:GenerateDataKey", "kms:Decrypt"],
    }
    assert "FAILED  create an object: " in report.text()


def test_doctor_refuses_a_store_that_ignores_if_match(
    bucket: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm_llm.storage import s3_trials, storage_probe
    from sm_llm.storage.s3.swap import read_tagged, swap

    def careless(store: Any, key: str, body: bytes, tag: str | None) -> str | None:
        return swap(store, key, body, tag and read_tagged(store, key).tag)

    monkeypatch.setattr(s3_trials, "swap", careless)
    report = storage_probe.probe_storage(f"s3://{bucket}/runs", {"endpoint_url": s3_server.endpoint})
    (failed,) = [it for it in report.checks if not it.ok]
    assert "this store ignores If-Match and replaces what has changed" in failed.problem
    assert report.policy is None


def test_doctor_refuses_a_store_that_overwrites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from sm_llm.storage.folder import FolderStore
    from sm_llm.storage.storage_probe import probe_storage

    real = FolderStore.put_if_absent

    def careless(self: FolderStore, key: str, body: bytes) -> bool:
        (self.root / key).unlink(missing_ok=True)
        return real(self, key, body)

    monkeypatch.setattr(FolderStore, "put_if_absent", careless)
    failed = [it for it in probe_storage(tmp_path / "runs").checks if not it.ok]
    assert "two jobs could both win" in failed[0].problem
