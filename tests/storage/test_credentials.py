"""Credentials that expire inside a file: the ones that came after them are used, with every engine, both ways."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from s3transfer.crt import RenameTempFileHandler

from sm_llm.errors import StorageError
from sm_llm.storage.arrival import accept, part_of
from sm_llm.storage.base import Copy
from sm_llm.storage.checksum import crc64_bytes, crc64_file
from sm_llm.storage.engines import crt, ranges
from sm_llm.storage.engines.auto import EngineTransfer
from sm_llm.storage.engines.crt import CrtTransfer
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.s3 import s3_client
from sm_llm.storage.s3.s3_client import connect
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from tests.fixtures.s3_server import KEY, OTHER_KEY, OTHER_SECRET, READER_KEY, READER_SECRET, SECRET

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
slow = pytest.mark.integration
pytestmark = pytest.mark.usefixtures("small_parts")
SIZES = {"s5cmd": 18 * MIB, "crt": 18 * MIB, "boto3": 18 * MIB, "ranges": 18 * MIB}
"""Bytes that make several parts."""


@pytest.fixture
def renewed(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Credentials come from a program; from this call on it gives others than before."""
    given = tmp_path / "credentials.json"

    def give(key: str, secret: str) -> None:
        pair = {"AccessKeyId": key, "SecretAccessKey": secret, "Expiration": "2099-01-01T00:00:00Z"}
        given.write_text(json.dumps({"Version": 1, **pair}))

    give(KEY, SECRET)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {given}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    return lambda: give(OTHER_KEY, OTHER_SECRET)


@pytest.fixture
def store(fault_proxy: Any, bucket: str) -> S3Store:
    return S3Store(bucket, "data", S3Options(endpoint_url=fault_proxy.endpoint), {"read_timeout": 5})


def expire(proxy: Any, rule: Any, match: str, first: int = 0) -> Any:
    """The first credentials end at a request; the rule that is returned counts what the others sign."""
    others = rule(match, "", key=OTHER_KEY, count=0)
    proxy.set(rule(match, "expired", key=KEY, first=first, count=10**6), others)
    return others


@pytest.mark.parametrize("engine", ["crt", "ranges", *(pytest.param(it, marks=slow) for it in ("s5cmd", "boto3"))])
def test_a_download_continues_with_new_credentials(
    store: S3Store,
    renewed: Any,
    fault_proxy: Any,
    rule: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", 4 * MIB)
    body = os.urandom(SIZES[engine])
    store.client.put_object(**store.at("large"), Body=body, ChecksumAlgorithm="CRC64NVME")
    others = expire(fault_proxy, rule, "GET .*data/large", first=1)
    renewed()
    copy = Copy("large", part_of(tmp_path / "large"), len(body), crc64_bytes(body))
    counted: list[int] = []
    transfer = RangesTransfer(workers=1) if engine == "ranges" else EngineTransfer(engine)
    transfer.download(store, [copy], counted.append)
    assert accept(copy, tmp_path / "large", copy.crc64nvme)
    assert others.seen >= 1
    assert sum(counted) == len(body)


@pytest.mark.parametrize("engine", ["crt", *(pytest.param(it, marks=slow) for it in ("s5cmd", "boto3"))])
def test_an_upload_continues_with_new_credentials_and_leaves_no_parts(
    store: S3Store, renewed: Any, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str
) -> None:
    for name, size in (("large", SIZES[engine]), ("small", 1000)):
        (tmp_path / name).write_bytes(os.urandom(size))
    copies = [
        Copy(it, tmp_path / it, (tmp_path / it).stat().st_size, crc64_file(tmp_path / it)) for it in ("large", "small")
    ]
    store.list("")
    others = expire(fault_proxy, rule, "PUT .*data/large.*partNumber=2|DELETE .*data/large")
    renewed()
    stored = EngineTransfer(engine).upload(store, copies, lambda _: None)
    assert [it.crc64nvme for it in stored] == [it.crc64nvme for it in copies]
    assert [store.checksum(it.key) for it in copies] == [it.crc64nvme for it in copies]
    assert others.seen >= 1
    assert "Uploads" not in store.client.list_multipart_uploads(Bucket=store.bucket)


def name_files_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime gives a file its name after it has reported its end: here, only after the failure was noticed."""
    noticed, settle, give_name = threading.Event(), crt.cancel_and_wait, RenameTempFileHandler.__call__

    def settled(*arguments: Any) -> None:
        settle(*arguments)
        noticed.set()

    def named_late(self: Any, **outcome: Any) -> None:
        if outcome["error"] is None:
            noticed.wait(30)
            time.sleep(0.2)
        give_name(self, **outcome)

    monkeypatch.setattr(crt, "cancel_and_wait", settled)
    monkeypatch.setattr(RenameTempFileHandler, "__call__", named_late)


@pytest.mark.parametrize("engine", ["s5cmd", pytest.param("crt", marks=slow)])
def test_an_engine_that_came_on_starts_again_with_new_credentials(
    store: S3Store, renewed: Any, fault_proxy: Any, rule: Any, tmp_path: Path, engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    copies = []
    for name in ("a", "b", "c"):
        body = os.urandom(1000)
        store.client.put_object(**store.at(name), Body=body, ChecksumAlgorithm="CRC64NVME")
        copies.append(Copy(name, part_of(tmp_path / name), len(body), crc64_bytes(body)))
    others = expire(fault_proxy, rule, "GET .*data/c")
    fault_proxy.rules.append(rule("GET .*data/[ab]", "slow", count=99, seconds=0.5))
    renewed()
    name_files_late(monkeypatch)
    output: list[str] = []
    EngineTransfer(engine, announce=output.append).download(store, copies, lambda _: None)
    assert others.seen == 1
    assert len(output) == 2
    assert f"{engine} continues with 1 file" in output[1]


def test_credentials_that_stay_expired_are_an_error_that_reports_it(
    store: S3Store, renewed: Any, fault_proxy: Any, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_TRIES", 2)
    store.client.put_object(**store.at("small"), Body=b"x" * 100)
    fault_proxy.set(rule("GET .*data/small", "expired", count=99))
    with pytest.raises(StorageError, match="the credentials have expired"):
        EngineTransfer("boto3").download(store, [Copy("small", tmp_path / "x.part", 100, "")], lambda _: None)


def test_the_crt_engine_refuses_in_one_line_when_there_are_no_credentials(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "x").write_bytes(b"x")
    copy = Copy("x", tmp_path / "x", 1, crc64_bytes(b"x"))
    with pytest.raises(StorageError, match=r"cannot store 'x': Unable to locate credentials\. Set AWS_PROFILE"):
        CrtTransfer().upload(store, [copy], lambda _: None)
    assert capfd.readouterr() == ("", ""), "the runtime's threads print what is raised in them"


def test_the_crt_engine_states_in_one_line_that_credentials_cannot_be_renewed_inside_a_file(
    store: S3Store, fault_proxy: Any, rule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from botocore.credentials import Credentials
    from botocore.exceptions import CredentialRetrievalError

    given = iter([Credentials(KEY, SECRET).get_frozen_credentials()])

    def frozen() -> Any:
        for once in given:
            return once
        raise CredentialRetrievalError(provider="role", error_msg="the role's session is over")

    (tmp_path / "x").write_bytes(b"x")
    fault_proxy.set(rule("PUT .*data/x", "expired", count=99))
    copy = Copy("x", tmp_path / "x", 1, crc64_bytes(b"x"))
    refused = pytest.raises(StorageError, match="cannot store 'x': the credentials have expired")
    with monkeypatch.context() as patch, refused:
        # Of this store alone: a thread of the fixtures makes the next bucket meanwhile.
        patch.setattr(store.session.get_credentials(), "get_frozen_credentials", frozen)
        CrtTransfer().upload(store, [copy], lambda _: None)
    assert capfd.readouterr() == ("", "")


def test_a_launch_makes_one_client_for_all_stores_that_are_reached_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    fresh = s3_client.fresh_session
    monkeypatch.setattr(s3_client, "fresh_session", lambda: made.append(fresh()) or made[-1])
    with s3_client.one_client():
        first, again = connect(S3Options()), connect(S3Options())
        other = connect(S3Options(endpoint_url="http://127.0.0.1:1"))
    assert first is again
    assert other is not first
    assert connect(S3Options())[1] is not first[1], "afterwards credentials are read anew"
    assert len(made) == 3


def test_what_a_service_understands_is_read_once_per_process() -> None:
    loaders = [s3_client.fresh_session().get_component("data_loader") for _ in range(2)]
    assert loaders[0] is loaders[1]


@pytest.mark.parametrize("engine", ["auto", "boto3"])
def test_an_upload_that_is_denied_breaks_off_in_one_line(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], engine: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER_SECRET)
    for number in range(40):
        (tmp_path / str(number)).write_bytes(b"x")
    copies = [Copy(str(number), tmp_path / str(number), 1, crc64_bytes(b"x")) for number in range(40)]
    with pytest.raises(StorageError, match="access denied"):
        EngineTransfer(engine).upload(store, copies, lambda _: None)
    assert capfd.readouterr() == ("", ""), "what is broken off prints nothing of its own"
