"""Tries what publication needs of a storage, one after the other, and reports which permissions are missing."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.s3.objects import to_base64, whole_checksum
from sm_llm.storage.s3.s3_client import DENIED, code_of, told
from sm_llm.storage.s3.store import S3Store
from sm_llm.storage.s3.swap import swap
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sm_llm.storage.base import Store
    from sm_llm.storage.s3.s3_options import S3Options

_BODY = b"sm_llm storage probe"


@dataclass(frozen=True)
class Check:
    """One thing tried: what, whether it worked, why not, and the IAM actions it lacks in S3."""

    name: str
    ok: bool
    problem: str = ""
    actions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StorageReport:
    """All that was tried; ``policy`` is the IAM policy that would allow what failed, or None."""

    uri: str
    checks: tuple[Check, ...]
    policy: dict[str, Any] | None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def text(self) -> str:
        """A line per check, then the policy."""
        lines = [
            f"{'ok    ' if it.ok else 'FAILED'}  {it.name}{': ' if it.problem else ''}{it.problem}"
            for it in self.checks
        ]
        if self.policy is not None:
            lines += ["", "This policy would allow what failed:", json.dumps(self.policy, indent=2)]
        return "\n".join(lines)


def probe_storage(uri: str | Path, options: S3Options | Mapping[str, Any] | None = None) -> StorageReport:
    """Try a storage: list, create once and only once, read, checksum, overwrite, multipart upload, delete.

    What it writes lies below ``.probe-<random>/`` and is deleted again. Never raises ``StorageError`` for what it
    tries: the report holds them. Raises it for an address that means nothing.
    """
    store = open_store(uri, options)
    key = f".probe-{secrets.token_hex(8)}/object"
    trials: list[tuple[str, Callable[[], None], tuple[str, ...]]] = [
        ("create an object", lambda: _create(store, key), ("s3:PutObject",)),
        ("create it only once (conditional write)", lambda: _create_again(store, key), ("s3:PutObject",)),
        ("read it", lambda: _read(store, key), ("s3:GetObject",)),
        ("know its checksum", lambda: _checksum(store, key), ("s3:GetObject",)),
        ("list", lambda: _list(store, key), ("s3:ListBucket",)),
    ]
    if isinstance(store, S3Store):
        upload, replacing = ("s3:PutObject", "s3:AbortMultipartUpload"), ("s3:PutObject", "s3:GetObject")
        trials += [
            ("replace only what was read (conditional overwrite)", lambda: _replace(store, f"{key}-record"), replacing),
            ("upload in parts", lambda: _upload_in_parts(store, f"{key}-parts"), upload),
            ("find unfinished uploads", lambda: _find_unfinished(store, key), ("s3:ListBucketMultipartUploads",)),
        ]
    trials.append(("delete", lambda: store.delete([key, f"{key}-record", f"{key}-parts"]), ("s3:DeleteObject",)))
    checks: tuple[Check, ...] = ()
    for name, trial, actions in trials:
        checks += (_try(name, trial, actions),)
        if not (checks[0].ok or checks[0].actions):
            break  # no bucket, no credentials, no answer: every further trial would only repeat it
    return StorageReport(store.uri, checks, _policy(store, [it for it in checks if not it.ok]))


def _try(name: str, trial: Callable[[], None], actions: tuple[str, ...]) -> Check:
    try:
        trial()
    except StorageError as error:
        return Check(name, False, str(error), actions if _is_denied(error) else ())
    return Check(name, True)


def _is_denied(error: StorageError) -> bool:
    # What delete_objects refuses is in its answer, without an error of the SDK.
    return code_of(error.__cause__) in DENIED or "AccessDenied" in str(error)


def _create(store: Store, key: str) -> None:
    if not store.put_if_absent(key, _BODY):
        raise StorageError("a fresh name is reported to exist already")


def _create_again(store: Store, key: str) -> None:
    if store.get(key) is None:
        raise StorageError("could not be tried, for the object could not be created or read")
    if store.put_if_absent(key, b"another body"):
        raise StorageError("this store overwrites what exists. It ignores If-None-Match, so two jobs could both win")


def _read(store: Store, key: str) -> None:
    if (body := store.get(key)) != _BODY:
        raise StorageError(f"read back {body!r} instead of {_BODY!r}")


def _checksum(store: Store, key: str) -> None:
    found = store.require(key).crc64nvme if isinstance(store, S3Store) else store.checksum(key)
    if found != crc64_bytes(_BODY):
        raise StorageError(f"it is returned as {found} instead of {crc64_bytes(_BODY)}: this store keeps no CRC64NVME")


def _list(store: Store, key: str) -> None:
    if key not in [it.key for it in store.list(key.partition("/")[0] + "/")]:
        raise StorageError("the object that was just created is not listed")


def _replace(store: S3Store, key: str) -> None:
    """As the record of a run is changed: by who has read it last."""
    first = swap(store, key, b"first", None)
    if first is None or swap(store, key, b"second", first) is None:
        raise StorageError("an object that nobody else changes cannot be replaced with If-Match and its own tag")
    if swap(store, key, b"third", first) is not None:
        raise StorageError("this store ignores If-Match and replaces what has changed: a change to a run could be lost")


def _upload_in_parts(store: S3Store, key: str) -> None:
    place, body = store.at(key), {"ChecksumCRC64NVME": to_base64(crc64_bytes(_BODY))}
    with told(store.uri, "upload in parts", key, "s3:PutObject"):
        upload = store.client.create_multipart_upload(
            **place | store.options.writing, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )["UploadId"]
        part = store.client.upload_part(**place, UploadId=upload, PartNumber=1, Body=_BODY, **body)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"], **body}]}
        store.client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts, **body)
        answer = store.client.head_object(**place, ChecksumMode="ENABLED")
    if whole_checksum(answer) != crc64_bytes(_BODY):
        raise StorageError("an object uploaded in parts has no CRC64NVME of the whole")


def _find_unfinished(store: S3Store, key: str) -> None:
    store.abort_unfinished(0.0, key)


def _policy(store: Store, failed: list[Check]) -> dict[str, Any] | None:
    actions = sorted({action for check in failed for action in check.actions})
    if not actions or not isinstance(store, S3Store):
        return None
    bucket = f"arn:aws:s3:::{store.bucket}"
    on_bucket = [it for it in actions if it.startswith("s3:ListBucket")]
    statements = [
        {"Effect": "Allow", "Action": chosen, "Resource": resource}
        for chosen, resource in (
            (on_bucket, bucket),
            ([it for it in actions if it not in on_bucket], f"{bucket}/{store.prefix}*"),
            (["kms:GenerateDataKey", "kms:Decrypt"] if store.options.kms_key_id else [], store.options.kms_key_id),
        )
        if chosen
    ]
    return {"Version": "2012-10-17", "Statement": statements}
