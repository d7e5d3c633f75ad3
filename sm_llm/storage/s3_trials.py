"""What publication needs of S3 beyond any other store: conditional overwrites, uploads in parts, permissions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.checksum import crc64_bytes
from sm_llm.storage.s3.s3_client import s3_errors
from sm_llm.storage.s3.s3_objects import to_base64, whole_checksum
from sm_llm.storage.s3.swap import swap
from sm_llm.storage.trials import BODY, Trial, Trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.storage.s3_store import S3Store


class S3Trials(Trials):
    """The trials of a store in S3."""

    def __init__(self, store: S3Store, key: str) -> None:
        super().__init__(store, key)
        self._s3 = store
        self._record, self._parts = f"{key}-record", f"{key}-parts"

    def own(self) -> list[Trial]:
        upload, replacing = ("s3:PutObject", "s3:AbortMultipartUpload"), ("s3:PutObject", "s3:GetObject")
        listing = ("s3:ListBucketMultipartUploads",)
        return [
            Trial("replace only what was read (conditional overwrite)", self._replace, replacing),
            Trial("upload in parts", self._upload_in_parts, upload),
            Trial("find unfinished uploads", self._find_unfinished, listing),
        ]

    def keys(self) -> list[str]:
        return [self._key, self._record, self._parts]

    def checksum(self) -> str | None:
        """The one that S3 keeps: of large files it is never computed from their bytes."""
        return self._s3.require(self._key).crc64nvme

    def policy(self, actions: Sequence[str]) -> dict[str, Any] | None:
        if not actions:
            return None
        bucket, key = f"arn:aws:s3:::{self._s3.bucket}", self._s3.options.kms_key_id
        on_bucket = [it for it in actions if it.startswith("s3:ListBucket")]
        statements = [
            {"Effect": "Allow", "Action": chosen, "Resource": resource}
            for chosen, resource in (
                (on_bucket, bucket),
                ([it for it in actions if it not in on_bucket], f"{bucket}/{self._s3.prefix}*"),
                (["kms:GenerateDataKey", "kms:Decrypt"] if key else [], key),
            )
            if chosen
        ]
        return {"Version": "2012-10-17", "Statement": statements}

    def _replace(self) -> None:
        """As the record of a run is changed: by who has read it last."""
        store, key = self._s3, self._record
        first = swap(store, key, b"first", None)
        if first is None or swap(store, key, b"second", first) is None:
            raise StorageError("an object that nobody else changes cannot be replaced with If-Match and its own tag")
        if swap(store, key, b"third", first) is not None:
            raise StorageError(
                "this store ignores If-Match and replaces what has changed: a change to a run could be lost"
            )

    def _upload_in_parts(self) -> None:
        store = self._s3
        location, body = store.at(self._parts), {"ChecksumCRC64NVME": to_base64(crc64_bytes(BODY))}
        with s3_errors(store.uri, "upload in parts", self._parts, "s3:PutObject"):
            upload = store.client.create_multipart_upload(
                **location | store.options.writing, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
            )["UploadId"]
            part = store.client.upload_part(**location, UploadId=upload, PartNumber=1, Body=BODY, **body)
            parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"], **body}]}
            store.client.complete_multipart_upload(**location, UploadId=upload, MultipartUpload=parts, **body)
            answer = store.client.head_object(**location, ChecksumMode="ENABLED")
        if whole_checksum(answer) != crc64_bytes(BODY):
            raise StorageError("an object uploaded in parts has no CRC64NVME of the whole")

    def _find_unfinished(self) -> None:
        self._s3.abort_unfinished(0.0, self._key)
