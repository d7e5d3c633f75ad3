"""Every engine through a proxy that spoils exact requests: what arrives is right, or the error is reported."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.arrival import accept, clear_leftovers, journal_of, part_of
from sm_llm.storage.base import Copy, MissingObjectError
from sm_llm.storage.checksum import crc64_bytes, crc64_file
from sm_llm.storage.engines import auto, ranges, s5cmd
from sm_llm.storage.engines.auto import EngineTransfer
from sm_llm.storage.engines.classic import ClassicTransfer
from sm_llm.storage.engines.common import MAX_PARTS, MIB, part_size
from sm_llm.storage.engines.crt import CrtTransfer
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.engines.s5cmd import S5cmdTransfer
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

ENGINES = ("s5cmd", "crt", "boto3", "ranges")
FEW = ("crt", "s5cmd", "boto3")

SIZE = 18 * MIB
"""Several parts with every engine."""


@pytest.fixture
def far(s3_server: Any, bucket: str) -> S3Store:
    """The store as it is."""
    return S3Store(bucket, "data", S3Options(endpoint_url=s3_server.endpoint))


@pytest.fixture
def near(fault_proxy: Any, bucket: str) -> S3Store:
    """The same store through the proxy."""
    return S3Store(bucket, "data", S3Options(endpoint_url=fault_proxy.endpoint), {"read_timeout": 5})


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", 4 * MIB)


def fill(store: S3Store, folder: Path, **sizes: int) -> list[Copy]:
    """Objects with random contents, put there by a plain client in one part, and where they are to be fetched."""
    copies = []
    for name, size in sizes.items():
        body = os.urandom(size)
        store.client.put_object(**store.at(name), Body=body, ChecksumAlgorithm="CRC64NVME")
        copies.append(Copy(name, part_of(folder / name), size, crc64_bytes(body)))
    return copies


def engine_of(name: str) -> Any:
    return RangesTransfer() if name == "ranges" else EngineTransfer(name)


def arrive(copies: list[Copy]) -> list[bool]:
    return [accept(it, it.path.with_name(it.path.name.removesuffix(".sm_llm.part")), it.crc64nvme) for it in copies]


def local_files(folder: Path, **sizes: int) -> list[Copy]:
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
        copies.append(Copy(name, folder / name, size, crc64_file(folder / name)))
    return copies


def open_uploads(store: S3Store) -> list[Any]:
    return list(store.client.list_multipart_uploads(Bucket=store.bucket).get("Uploads", ()))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("small_ranges")
def test_what_goes_up_comes_down(far: S3Store, tmp_path: Path, engine: str) -> None:
    counted: list[int] = []
    copies = local_files(tmp_path / "in", **{"empty": 0, "two words$": 1000, "ü": SIZE})
    uploader = EngineTransfer("boto3" if engine == "ranges" else engine)
    stored = uploader.upload(far, copies, counted.append)
    assert [(it.key, it.size, it.crc64nvme) for it in stored] == [(it.key, it.size, it.crc64nvme) for it in copies]
    assert sum(counted) == SIZE + 1000
    fetched = [Copy(it.key, part_of(tmp_path / "out" / it.key), it.size, it.crc64nvme) for it in copies]
    counted.clear()
    engine_of(engine).download(far, fetched, counted.append)
    assert arrive(fetched) == [True] * 3
    assert sum(counted) == SIZE + 1000


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("action", ["503", "reset", "cut"])
@pytest.mark.usefixtures("small_ranges")
def test_a_request_that_fails_is_made_good(
    far: S3Store, near: S3Store, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str, action: str
) -> None:
    copies = fill(far, tmp_path, large=SIZE, small=1000)
    fault_proxy.set(rule("GET /.*/data/large", action, count=2))
    engine_of(engine).download(near, copies, lambda _: None)
    assert arrive(copies) == [True, True]


@pytest.mark.parametrize("engine", FEW)
def test_a_missing_object_is_a_missing_object_with_every_engine(far: S3Store, tmp_path: Path, engine: str) -> None:
    with pytest.raises(MissingObjectError):
        EngineTransfer(engine).download(far, [Copy("gone", tmp_path / "gone.part", 10, "")], lambda _: None)


@pytest.mark.parametrize("engine", FEW)
@pytest.mark.parametrize(
    ("match", "action"),
    [
        ("PUT .*partNumber=2", "503"),
        ("PUT .*partNumber=1", "lost"),
        ("POST .*uploadId=", "lost"),
        ("POST .*uploads", "lost"),
    ],
    ids=["part-503", "part-lost", "complete-lost", "create-lost"],
)
@pytest.mark.usefixtures("small_parts")
def test_I4_a_fault_in_a_multipart_upload_has_one_outcome(
    near: S3Store, far: S3Store, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str, match: str, action: str
) -> None:
    copies = local_files(tmp_path, large=SIZE)
    fault_proxy.set(rule(match, action))
    stored = EngineTransfer(engine).upload(near, copies, lambda _: None)
    assert fault_proxy.rules[0].seen >= 1
    assert stored[0].crc64nvme == copies[0].crc64nvme == far.checksum("large")
    far.abort_unfinished(time.time() + 60)


def test_a_bit_flipped_on_the_way_up_is_refused_by_the_store(far: S3Store, tmp_path: Path) -> None:
    copies = [
        Copy(it.key, it.path, it.size, f"{int(it.crc64nvme, 16) ^ 1:016x}") for it in local_files(tmp_path, a=100)
    ]
    for engine in (CrtTransfer(), ClassicTransfer()):
        with pytest.raises(StorageError):
            engine.upload(far, copies, lambda _: None)
    assert far.list("") == []


@pytest.mark.usefixtures("small_ranges")
def test_a_download_continues_inside_a_file(
    far: S3Store, near: S3Store, fault_proxy: Any, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_TRIES", 1)
    copies = fill(far, tmp_path, large=SIZE)
    fault_proxy.set(rule("GET .*data/large", "dead", first=3))
    near._config["retries"] = {"total_max_attempts": 1}
    with pytest.raises(StorageError):
        RangesTransfer(workers=1).download(near, copies, lambda _: None)
    assert journal_of(copies[0].path).exists()
    fault_proxy.set()
    counted: list[int] = []
    EngineTransfer("s5cmd").download(near, copies, counted.append)
    assert fault_proxy.bytes_sent < SIZE - 2 * 4 * MIB, "what was there was not fetched again, and by ranges"
    assert sum(counted) == SIZE
    assert arrive(copies) == [True]
    assert [it.name for it in tmp_path.iterdir()] == ["large"]


@pytest.mark.usefixtures("small_ranges")
def test_a_half_fetched_file_of_another_object_is_begun_anew(far: S3Store, tmp_path: Path) -> None:
    old = fill(far, tmp_path, large=SIZE)[0]
    RangesTransfer().download(far, [old], lambda _: None)
    new = fill(far, tmp_path, large=SIZE)[0]
    assert RangesTransfer().download(far, [new], lambda _: None) == {"large": new.crc64nvme}
    assert arrive([new]) == [True]


@pytest.mark.usefixtures("small_ranges")
def test_an_object_that_changes_while_it_is_read_is_an_error(far: S3Store, tmp_path: Path) -> None:
    copies = fill(far, tmp_path, large=SIZE)
    overwritten = threading.Event()

    def overwrite(_: int) -> None:
        if not overwritten.is_set():
            overwritten.set()
            fill(far, tmp_path, large=SIZE)

    with pytest.raises(StorageError):
        RangesTransfer(workers=1).download(far, copies, overwrite)


def test_a_bandwidth_cap_is_kept_and_taken_by_an_engine_that_can(
    far: S3Store, tmp_path: Path, retry_clock: Any
) -> None:
    copies = fill(far, tmp_path, a=3_000_000, b=3_000_000)
    output: list[str] = []
    EngineTransfer("s5cmd", max_bandwidth=4_000_000, announce=output.append).download(far, copies, lambda _: None)
    assert retry_clock.seconds > 1.2
    assert output == ["ranges: 2 files, 6,000,000 bytes"]
    output.clear()
    sources = local_files(tmp_path, c=1000)
    EngineTransfer("crt", max_bandwidth=4_000_000, announce=output.append).upload(far, sources, lambda _: None)
    assert output == ["boto3: 1 file, 1,000 bytes"]


def test_auto_chooses_by_direction_and_size_and_reports_it(
    far: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "RESUME_BYTES", 20 * MIB)
    copies = fill(far, tmp_path, small=10, large=17 * MIB, huge=21 * MIB)
    output: list[str] = []
    EngineTransfer(announce=output.append).download(far, copies, lambda _: None)
    assert [line.split(":")[0] for line in output] == ["crt", "s5cmd", "ranges"]
    output.clear()
    EngineTransfer(announce=output.append, resume=False).download(far, copies, lambda _: None)
    assert [line.split(":")[0] for line in output] == ["crt", "s5cmd"]
    output.clear()
    EngineTransfer(announce=output.append).upload(far, local_files(tmp_path, a=10, b=17 * MIB), lambda _: None)
    assert [line.split(":")[0] for line in output] == ["crt"]
    monkeypatch.setattr(auto.s5cmd, "binary", lambda: None)
    output.clear()
    EngineTransfer(announce=output.append, resume=False).download(far, copies, lambda _: None)
    assert [line.split(":")[0] for line in output] == ["crt"]
    with pytest.raises(StorageError, match="s5cmd is not installed"):
        EngineTransfer("s5cmd")
    with pytest.raises(StorageError, match=r"there is no 'rclone'\. Known: auto, s5cmd, crt, boto3"):
        EngineTransfer("rclone")


def program(folder: Path, text: str) -> str:
    """A fake s5cmd."""
    path = folder / "s5cmd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(
    "text",
    [
        "echo 'ERROR \"sync s3://b/x\": no object found'; exit 0",
        'echo \'{"operation":"cp","error":"no object found"}\' >&2; exit 0',
        "exit 0",
        'echo \'{"operation":"cp","success":true,"object":{"size":10}}\'; exit 0',
        'echo \'{"operation":"cp","success":true,"object":{"size":10}}\'; exit 1',
        'echo \'{"operation":"cp","success":true,"object":{"size":10}}\'; exit 2',
    ],
    ids=["S301-error-line", "S301-json-error", "S301-nothing-done", "S301-nothing-there", "S308-rc1", "S308-rc2"],
)
def test_S301_S308_an_exit_code_alone_proves_nothing(near: S3Store, tmp_path: Path, text: str) -> None:
    engine = S5cmdTransfer(program(tmp_path, text))
    with pytest.raises(StorageError):
        engine.download(near, [Copy("x", tmp_path / "x.part", 10, "")], lambda _: None)


def test_I8_s5cmd_is_ended_when_nothing_comes(near: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s5cmd, "most_seconds", lambda *_: 0.2)
    engine = S5cmdTransfer(program(tmp_path, "exec sleep 600"))
    with pytest.raises(StorageError, match=r"was not done within 0 s"):
        engine.download(near, [Copy("a", tmp_path / "a", 1, "0" * 16)], lambda _: None)


def test_S302_the_first_download_into_a_new_folder_works(far: S3Store, tmp_path: Path) -> None:
    copies = fill(far, tmp_path / "not" / "there" / "yet", x=100)
    S5cmdTransfer().download(far, copies, lambda _: None)
    assert arrive(copies) == [True]


def test_no_credentials_are_seen_in_the_arguments_of_s5cmd(near: S3Store, tmp_path: Path) -> None:
    reported = tmp_path / "told"
    engine = S5cmdTransfer(program(tmp_path, f'echo "$@" > {reported}; cat >> {reported}; exit 1'))
    with pytest.raises(StorageError):
        engine.download(near, [Copy("x", tmp_path / "x.part", 10, "")], lambda _: None)
    assert "test-secret" not in reported.read_text()
    assert "--delete" not in reported.read_text()
    assert "cp --raw" in reported.read_text()


def test_a_transfer_that_is_killed_leaves_nothing_in_the_temporary_folder(
    near: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to leave: while s5cmd runs, the folder is empty."""
    folder, seen = tmp_path / "temporary", tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(StorageError):
        S5cmdTransfer(program(tmp_path, f"ls -A {folder} > {seen}; exit 1")).download(
            near, [Copy("x", tmp_path / "x.part", 10, "")], lambda _: None
        )
    assert seen.read_text() == ""


def test_names_s5cmd_cannot_be_passed_go_by_another_engine(far: S3Store, tmp_path: Path) -> None:
    far.client.put_object(Bucket=far.bucket, Key="data/two\nlines", Body=b"x", ChecksumAlgorithm="CRC64NVME")
    output: list[str] = []
    copies = [Copy("two\nlines", tmp_path / "x.part", 1, "")]
    EngineTransfer("s5cmd", announce=output.append).download(far, copies, lambda _: None)
    assert output[0].startswith("ranges")


def test_what_killed_engines_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    for name in (
        "x.sm_llm.part8765432",
        "x.sm_llm.part.aB3dE6f8",
        "x.sm_llm.part",
        "x.sm_llm.part.ranges",
        "y.sm_llm.part.aB3dE6f8",
        "x",
        "x.sm_llm.parts",
    ):
        (tmp_path / name).touch()
    clear_leftovers([tmp_path / "x.sm_llm.part"])
    assert sorted(it.name for it in tmp_path.iterdir()) == [
        "x",
        "x.sm_llm.part",
        "x.sm_llm.part.ranges",
        "x.sm_llm.parts",
        "y.sm_llm.part.aB3dE6f8",
    ]


@pytest.mark.parametrize("size", [0, 1, MIB, 5 << 30, 80 << 30, 5 << 40])
def test_parts_are_few_and_large_enough(size: int) -> None:
    assert part_size(size) % MIB == 0
    assert part_size(size) >= 8 * MIB
    assert -(-size // part_size(size)) <= MAX_PARTS


def test_an_interrupted_upload_leaves_no_open_parts(
    far: S3Store, near: S3Store, fault_proxy: Any, rule: Any, tmp_path: Path
) -> None:
    copies = local_files(tmp_path, large=SIZE)
    # Whoever starts the tests in the background of a shell has them ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for engine in ("crt", "boto3"):
        fault_proxy.set(rule("PUT .*partNumber=2", "hang", count=99, seconds=1))

        over = threading.Event()

        def interrupt(over: threading.Event = over) -> None:
            while not fault_proxy.count("PUT .*partNumber=2"):
                if over.wait(0.01):
                    return
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                EngineTransfer(engine).upload(near, copies, lambda _: None)
        finally:
            over.set()
        assert open_uploads(far) == []
        assert far.list("") == []
