"""The S3 store keeps the promises of a Store, on a real server; what no server here can do, on a stubbed client."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.storage.base import MissingObjectError
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.publication.publish import find_newest
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from pathlib import Path

ODD_NAMES = [
    "two words.bin",
    "a$b.txt",
    "ünïcode/ø.bin",
    "plus+and&amp;.bin",
    "per%20cent",
    "quote'\"`.bin",
    "#hash?",
    "d/e",
]


@pytest.fixture
def store(s3_server: Any, bucket: str) -> S3Store:
    return S3Store(bucket, "runs/tiny", S3Options(endpoint_url=s3_server.endpoint))


def test_the_first_writer_wins_and_its_body_stays(store: S3Store) -> None:
    assert store.put_if_absent("a/b/key.json", b"first") is True
    assert store.put_if_absent("a/b/key.json", b"second") is False
    assert store.get("a/b/key.json") == b"first"
    assert [it.key for it in store.list("")] == ["a/b/key.json"]


def test_of_racing_writers_exactly_one_wins(store: S3Store) -> None:
    for race in range(3):
        start = threading.Barrier(6)

        def write(number: int, key: str = f"race/{race}", start: threading.Barrier = start) -> bool:
            start.wait()
            return store.put_if_absent(key, b"%d" % number * 5000)

        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(write, range(6)))
        assert won.count(True) == 1
        assert store.get(f"race/{race}") == b"%d" % won.index(True) * 5000


def test_files_go_in_and_out_unchanged_in_one_part_and_in_several(store: S3Store, tmp_path: Path) -> None:
    for size in (0, 100, 20_000_000):
        body = os.urandom(size)
        (tmp_path / "source").write_bytes(body)
        stored = store.put_file(tmp_path / "source", f"data/{size}.bin")
        assert (stored.size, stored.crc64nvme) == (size, crc64_bytes(body))
        assert store.checksum(f"data/{size}.bin") == crc64_bytes(body)
        store.get_file(f"data/{size}.bin", tmp_path / "out" / "x.bin")
        assert (tmp_path / "out" / "x.bin").read_bytes() == body
    assert [it.name for it in (tmp_path / "out").iterdir()] == ["x.bin"]


def test_an_object_without_our_checksum_is_read_to_know_it(store: S3Store, s3_server: Any) -> None:
    s3_server.client.put_object(Bucket=store.bucket, Key="runs/tiny/other", Body=b"by another program")
    assert store.checksum("other") == crc64_bytes(b"by another program")


def test_what_is_not_there_is_a_value_or_a_missing_object(store: S3Store, tmp_path: Path) -> None:
    assert store.get("no") is None
    assert store.head("no") is None
    assert store.list("no/") == []
    store.delete(["no"])
    for ask in (lambda: store.checksum("no"), lambda: store.get_file("no", tmp_path / "x")):
        with pytest.raises(MissingObjectError, match="'no' does not exist"):
            ask()


def test_I7_a_missing_bucket_is_never_an_empty_one(s3_server: Any, aws_environment: None, tmp_path: Path) -> None:
    gone = S3Store("no-such-bucket", "runs", S3Options(endpoint_url=s3_server.endpoint))
    (tmp_path / "x").write_bytes(b"x")
    for ask in (
        lambda: gone.get("k"),
        lambda: gone.head("k"),
        lambda: gone.list(""),
        lambda: gone.put_if_absent("k", b""),
        lambda: gone.checksum("k"),
        lambda: gone.put_file(tmp_path / "x", "k"),
        lambda: find_newest(gone),
    ):
        with pytest.raises(StorageError, match="the bucket does not exist") as caught:
            ask()
        assert not isinstance(caught.value, MissingObjectError)


def test_I7_wrong_credentials_are_an_error_that_names_the_permission(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError):
        store.list("")
    with pytest.raises(StorageError):
        find_newest(store)


def test_no_credentials_at_all_is_reported_with_the_remedy(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="Set AWS_PROFILE or AWS_ACCESS_KEY_ID"):
        store.list("")


def test_a_server_that_does_not_answer_is_reported(aws_environment: None) -> None:
    nowhere = S3Store(
        "bucket", "", S3Options(endpoint_url="http://127.0.0.1:9"), {"retries": {"total_max_attempts": 1}}
    )
    with pytest.raises(StorageError, match="Could not connect"):
        nowhere.list("")


def test_CK03_a_prefix_ends_at_its_slash(s3_server: Any, bucket: str) -> None:
    for key in ("run-1/x", "run-10/x", "run-1x"):
        s3_server.client.put_object(Bucket=bucket, Key=key, Body=b"x")
    options = {"endpoint_url": s3_server.endpoint}
    assert [it.key for it in open_store(f"s3://{bucket}/run-1", options).list("")] == ["x"]


def test_what_the_console_makes_for_a_folder_is_not_an_object(store: S3Store) -> None:
    for key in (store.prefix, f"{store.prefix}below/"):
        store.client.put_object(Bucket=store.bucket, Key=key, Body=b"")
    assert store.list("") == []
    assert not store.below("below").holds()
    store.put_if_absent("below/x", b"x")
    assert [it.key for it in store.list("")] == ["below/x"]
    assert store.below("below").holds()


def test_S303_odd_names_survive(store: S3Store) -> None:
    for name in ODD_NAMES:
        assert store.put_if_absent(name, name.encode())
    assert [it.key for it in store.list("")] == sorted(ODD_NAMES)
    for name in ODD_NAMES:
        assert store.get(name) == name.encode()
        found = store.head(name)
        assert found is not None
        assert found.size == len(name.encode())
    store.delete(ODD_NAMES)
    assert store.list("") == []


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/./b", "a/", "a\0b"])
def test_keys_that_no_file_could_have_are_refused(store: S3Store, key: str) -> None:
    with pytest.raises(StorageError, match="is not a key"):
        store.put_if_absent(key, b"")


def test_listings_and_deletions_go_beyond_one_page(store: S3Store) -> None:
    keys = [f"many/{number:05d}" for number in range(1005)]
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda key: store.put_if_absent(key, b"x"), keys))
    assert [it.key for it in store.list("many/")] == keys
    store.delete(keys)
    assert store.list("") == []


def test_unfinished_uploads_go_by_age_and_prefix(store: S3Store) -> None:
    for key in ("a/x", "b/x"):
        upload = store.client.create_multipart_upload(**store.at(key))["UploadId"]
        store.client.upload_part(**store.at(key), UploadId=upload, PartNumber=1, Body=b"part")
    assert store.list("") == []
    assert store.abort_unfinished(time.time() - 3600) == 0
    assert store.abort_unfinished(time.time() + 60, "a/") == 1
    assert store.abort_unfinished(time.time() + 60) == 1
    assert store.abort_unfinished(time.time() + 60) == 0


class Answers:
    """A client whose ``put_object`` gives one prepared error after the other, then succeeds."""

    def __init__(self, *errors: tuple[int, str]) -> None:
        self.errors = list(errors)
        self.calls: list[dict[str, Any]] = []

    def put_object(self, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        self.calls.append(arguments)
        if self.errors:
            status, code = self.errors.pop(0)
            answer = {"Error": {"Code": code, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise ClientError(answer, "PutObject")
        return {"ETag": '"0"', "ResponseMetadata": {"HTTPStatusCode": 200}}


def answering(monkeypatch: pytest.MonkeyPatch, *errors: tuple[int, str], **options: str) -> tuple[S3Store, Answers]:
    answers = Answers(*errors)
    monkeypatch.setattr("sm_llm.storage.s3.s3_objects.time.sleep", lambda _: None)
    monkeypatch.setattr(S3Store, "client", property(lambda _: answers))
    return S3Store("bucket", "", S3Options(**options)), answers


@pytest.mark.parametrize("passing", [(409, "ConditionalRequestConflict"), (404, "NoSuchKey")])
def test_a_conflict_of_conditional_writes_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, passing: tuple[int, str]
) -> None:
    store, answers = answering(monkeypatch, passing, passing)
    assert store.put_if_absent("k", b"") is True
    assert len(answers.calls) == 3
    store, _ = answering(monkeypatch, *[passing] * 99)
    with pytest.raises(StorageError, match="other writers were in the way"):
        store.put_if_absent("k", b"")


def test_412_is_a_value_and_a_missing_bucket_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = answering(monkeypatch, (412, "PreconditionFailed"))
    assert store.put_if_absent("k", b"") is False
    store, answers = answering(monkeypatch, (404, "NoSuchBucket"))
    with pytest.raises(StorageError, match="the bucket does not exist"):
        store.put_if_absent("k", b"")
    assert len(answers.calls) == 1


@pytest.fixture
def near(fault_proxy: Any, bucket: str) -> S3Store:
    """The store through the proxy."""
    return S3Store(bucket, "runs/tiny", S3Options(endpoint_url=fault_proxy.endpoint))


@pytest.mark.parametrize(
    ("actions", "created", "requests"),
    [
        ([], True, 1),  # 200
        (["412"], False, 1),
        (["409", "404", "409"], True, 4),
        (["503", "409", "reset"], True, 4),
        (["lost"], False, 2),  # the SDK repeats it and meets its own object: the reader of the nonce decides
    ],
    ids=["200", "412", "409-404", "503-409-reset", "lost"],
)
def test_answers_to_a_conditional_write_are_distinguished_on_the_wire(
    near: S3Store, fault_proxy: Any, rule: Any, actions: list[str], created: bool, requests: int
) -> None:
    fault_proxy.set(*(rule("PUT", action, first=number) for number, action in enumerate(actions)))
    assert near.put_if_absent("k", b"body") is created
    assert fault_proxy.count("PUT") == requests
    assert near.get("k") == (None if actions == ["412"] else b"body")


def test_a_clock_that_is_wrong_is_named(near: S3Store, fault_proxy: Any, rule: Any) -> None:
    fault_proxy.set(rule(".", "skewed", count=99))
    with pytest.raises(StorageError, match="this machine's clock is wrong"):
        near.list("")


def test_access_denied_names_the_action_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = answering(monkeypatch, (403, "AccessDenied"))
    with pytest.raises(StorageError, match=r"Needed: s3:PutObject on arn:aws:s3:::bucket/\*"):
        store.put_if_absent("k", b"")


def test_keys_that_the_store_does_not_know_are_reported_with_what_to_do(
    near: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobodys")
    with pytest.raises(StorageError, match=r"InvalidAccessKeyId .*Set AWS_PROFILE or"):
        near.list("")


@pytest.mark.parametrize(
    ("answer", "md5"),
    [
        ({"ETag": f'"{"ab" * 16}"'}, "ab" * 16),
        ({"ETag": f'"{"ab" * 16}"', "ServerSideEncryption": "AES256"}, "ab" * 16),
        ({"ETag": f'"{"ab" * 16}"', "ServerSideEncryption": "aws:kms"}, None),
        ({"ETag": f'"{"ab" * 16}"', "SSECustomerAlgorithm": "AES256"}, None),
        ({"ETag": f'"{"ab" * 16}-2"'}, None),
    ],
    ids=["plain", "SSE-S3", "SSE-KMS", "SSE-C", "parts"],
)
def test_an_entity_tag_is_taken_for_an_md5_only_where_it_is_one(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], md5: str | None
) -> None:
    store, answers = answering(monkeypatch)
    reported = {"ContentLength": 1, "LastModified": datetime(2026, 1, 1, tzinfo=UTC), **answer}
    monkeypatch.setattr(answers, "head_object", lambda **_: reported, raising=False)
    assert store.require("k").md5 == md5


def test_encryption_class_and_owner_go_with_every_write(monkeypatch: pytest.MonkeyPatch) -> None:
    store, answers = answering(
        monkeypatch, kms_key_id="key-1", storage_class="STANDARD_IA", expected_bucket_owner="123456789012"
    )
    store.put_if_absent("k", b"body")
    assert (
        answers.calls[0].items()
        >= {
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "key-1",
            "StorageClass": "STANDARD_IA",
            "ExpectedBucketOwner": "123456789012",
            "IfNoneMatch": "*",
        }.items()
    )


def test_encryption_and_class_are_kept_by_the_service(aws_environment: None, tmp_path: Path) -> None:
    """moto, a double of the service, returns what an object was stored with; it is trusted with nothing else."""
    from moto import mock_aws

    with mock_aws():
        store = S3Store("kms-bucket", "", S3Options(kms_key_id="alias/mine", storage_class="STANDARD_IA"))
        store.client.create_bucket(Bucket="kms-bucket")
        (tmp_path / "x").write_bytes(os.urandom(20_000_000))
        store.put_if_absent("small", b"x")
        store.put_file(tmp_path / "x", "large")
        for key in ("small", "large"):
            answer = store.client.head_object(Bucket="kms-bucket", Key=key)
            assert (answer["ServerSideEncryption"], answer["StorageClass"]) == ("aws:kms", "STANDARD_IA")
            assert "alias/mine" in answer["SSEKMSKeyId"]


def test_every_spec_option_reaches_the_store() -> None:
    from sm_llm.spec.inputs import StorageOptions

    given = StorageOptions(
        endpoint_url="https://s3.example", region="eu-west-1", kms_key_id="k", storage_class="GLACIER_IR"
    )
    store = open_store("s3://bucket/x", given.model_dump())
    assert isinstance(store, S3Store)
    assert vars(store.options) == given.model_dump()
