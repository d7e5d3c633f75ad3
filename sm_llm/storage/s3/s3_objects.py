"""Objects below a prefix of a bucket: plain boto3 calls for small objects, listings and checksums."""

from __future__ import annotations

import base64
import random
import re
import threading
import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sm_llm.errors import StorageError
from sm_llm.optional import missing
from sm_llm.storage.base import MissingObjectError, StoredObject
from sm_llm.storage.checksum import CHUNK_BYTES, Crc64, crc64_bytes
from sm_llm.storage.s3.listing import first_objects, object_pages, upload_pages, whole
from sm_llm.storage.s3.s3_client import (
    AnswerError,
    code_of,
    connect,
    header,
    require_stored,
    s3_errors,
    small_body,
    status_of,
)
from sm_llm.storage.s3.s3_options import S3Options

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_CONFLICT_TRIES = 6
_DELETE_BATCH = 1000
_MISSING = ("NoSuchKey", "404", "NotFound")
_MD5 = re.compile(r"[0-9a-f]{32}")


class S3Objects:
    """Objects below ``prefix`` of a bucket. Nothing is touched before the first call.

    ``config`` overrides settings of ``botocore.config.Config`` (timeouts, retries). Safe to share between threads;
    a process that it is sent to (pickled) connects anew. Raises ``StorageError`` where boto3 is not installed.
    """

    def __init__(
        self, bucket: str, prefix: str = "", options: S3Options | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        if (lack := missing("boto3", "botocore")) is not None:
            raise StorageError(f"s3://{bucket}: {lack}")
        self.bucket = bucket
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")
        self.options = options or S3Options()
        self._config = dict(config or {})
        self._lock = threading.Lock()
        self._connected: tuple[Any, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets the same store, and connects by itself."""
        return type(self), (self.bucket, self.prefix, self.options, self._config)

    @property
    def client(self) -> Any:
        """The boto3 client."""
        return self._connect()[1]

    @property
    def session(self) -> Any:
        """The botocore session the client's credentials come from."""
        return self._connect()[0]

    def below(self, folder: str) -> Self:
        """The store of a folder in this one, over the same connection."""
        store = type(self)(self.bucket, self.full_key(folder), self.options, self._config)
        # A listing of runs makes one store per run; a client for each would cost more than its requests.
        store._connected = self._connect()
        return store

    def renew(self) -> None:
        """Read credentials anew from their source: what was valid when the run began may have expired."""
        with self._lock:
            self._connected = None

    def _connect(self) -> tuple[Any, Any]:
        with self._lock:
            if self._connected is None:
                self._connected = connect(self.options, self._config)
            return self._connected

    def at(self, key: str) -> dict[str, str]:
        """The arguments that name an object in a call."""
        return {"Bucket": self.bucket, "Key": self.full_key(key), **self.options.owner}

    def full_key(self, key: str) -> str:
        """``key`` as the bucket knows it. Raises ``StorageError`` for what no file could be called."""
        if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
            raise StorageError(f"{self.uri}: {key!r} is not a key. Keys are relative, with single slashes")
        return self.prefix + key

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """``PUT`` with ``If-None-Match: *``.

        False on 412, which may be our own write whose answer got lost: the caller reads back and compares. 409 (two
        writers at once) and 404 of a key (one just deleted) are tried again; a missing bucket is an error.
        """
        from botocore.exceptions import ClientError

        with s3_errors(self.uri, "create", key, self.needs("PutObject")):
            for attempt in range(_CONFLICT_TRIES):
                try:
                    self.put(key, body, IfNoneMatch="*")
                    return True
                except ClientError as error:
                    if status_of(error) == 412:
                        return False
                    if status_of(error) != 409 and not (status_of(error) == 404 and code_of(error) == "NoSuchKey"):
                        raise
                # Full jitter: writers that have collided once must not try again in step.
                time.sleep(random.uniform(0, 0.1 * 2**attempt))
        raise StorageError(f"{self.uri}: cannot create {key!r}: other writers were in the way {_CONFLICT_TRIES} times")

    def put(self, key: str, body: bytes, **condition: str) -> str:
        """One PUT under a condition, whose answer is checked; returns the entity tag. Errors are the SDK's."""
        checksum = to_base64(crc64_bytes(body))
        # ``at`` passes the owner already, and a keyword given twice is a ``TypeError``.
        writing = {name: value for name, value in self.options.writing.items() if name not in self.options.owner}
        answer = self.client.put_object(
            **self.at(key), **writing, **condition, Body=body, ChecksumCRC64NVME=checksum
        )  # fmt: skip
        return require_stored(answer, checksum)

    def get(self, key: str) -> bytes | None:
        from botocore.exceptions import ClientError

        with s3_errors(self.uri, "read", key, self.needs("GetObject")):
            try:
                answer = self.client.get_object(**self.at(key))
                return small_body(answer, self.uri, key)
            except ClientError as error:
                # Only this code: a 404 of a missing bucket, or of a proxy, must not pass for a missing object.
                if code_of(error) == "NoSuchKey":
                    return None
                raise

    def head(self, key: str) -> StoredObject | None:
        """Size, time, entity tag, and the CRC64NVME of the whole object where S3 keeps one."""
        from botocore.exceptions import ClientError

        with s3_errors(self.uri, "look up", key, f"{self.needs('GetObject')} and s3:ListBucket"):
            try:
                answer = self.client.head_object(**self.at(key), ChecksumMode="ENABLED")
            except ClientError as error:
                if code_of(error) not in _MISSING:
                    raise
                # A HEAD has no body to tell a missing key from a missing bucket; a listing fails for the latter.
                first_objects(self.client, self.bucket, self.full_key(key), 1, **self.options.owner)
                return None
            return StoredObject(
                key,
                header(answer, "ContentLength", int),
                whole_checksum(answer),
                header(answer, "LastModified", datetime).timestamp(),
                header(answer, "ETag", str).strip('"'),
                _md5(answer),
            )

    def require(self, key: str) -> StoredObject:
        """``head`` of what must be there. Raises ``MissingObjectError``."""
        found = self.head(key)
        if found is None:
            raise MissingObjectError(f"{self.uri}: {key!r} does not exist")
        return found

    def checksum(self, key: str) -> str:
        """The CRC64NVME that S3 keeps of the object; of an object without one, that of its bytes, read now."""
        found = self.require(key)
        if found.crc64nvme is not None:
            return found.crc64nvme
        crc, count = Crc64(), 0
        with s3_errors(self.uri, "read", key, self.needs("GetObject")):
            for chunk in self.client.get_object(**self.at(key))["Body"].iter_chunks(CHUNK_BYTES):
                crc.update(chunk)
                count += len(chunk)
            if count != found.size:
                raise AnswerError(f"{count:,} of {found.size:,} bytes arrived")
        return crc.hexdigest()

    def list(self, prefix: str) -> list[StoredObject]:
        """Every object whose key starts with ``prefix``, by key; not the empty ones that stand for folders."""
        with s3_errors(self.uri, "list", prefix, f"s3:ListBucket on arn:aws:s3:::{self.bucket}"):
            pages = object_pages(self.client, self.bucket, self.prefix + prefix, **self.options.owner)
            found = [self._stored(item) for page in pages for item in page.get("Contents") or ()]
        return sorted((it for it in found if it is not None), key=lambda it: it.key)

    def holds(self, prefix: str = "") -> bool:
        """Whether any key starts with ``prefix``, beside one that stands for the folder itself; asks for two."""
        begin = self.prefix + prefix
        with s3_errors(self.uri, "list", prefix, f"s3:ListBucket on arn:aws:s3:::{self.bucket}"):
            answer = first_objects(self.client, self.bucket, begin, 2, **self.options.owner)
        return any(it["Key"] != begin or not begin.endswith("/") for it in answer.get("Contents") or ())

    def first(self, count: int) -> tuple[Sequence[StoredObject], bool]:
        """At most ``count`` objects, by key, and whether these are all; one request."""
        with s3_errors(self.uri, "list", "", f"s3:ListBucket on arn:aws:s3:::{self.bucket}"):
            answer = first_objects(self.client, self.bucket, self.prefix, count, **self.options.owner)
        found = [self._stored(item) for item in answer.get("Contents") or ()]
        return [it for it in found if it is not None], not answer["IsTruncated"]

    def _stored(self, item: Mapping[str, Any]) -> StoredObject | None:
        """An object of a listing; None for an empty one that stands for a folder."""
        # The S3 console creates empty objects with a closing "/" where a user asks for a folder: they are not files.
        if not item["Size"] and item["Key"].endswith("/"):
            return None
        key, modified = item["Key"][len(self.prefix) :], item["LastModified"].timestamp()
        return StoredObject(key, item["Size"], None, modified, item.get("ETag", "").strip('"'))

    def delete(self, keys: Iterable[str]) -> None:
        for batch in _batches(self.full_key(key) for key in keys):
            with s3_errors(self.uri, "delete", batch[0], self.needs("DeleteObject")):
                request = partial(
                    self.client.delete_objects,
                    Bucket=self.bucket,
                    Delete={"Objects": [{"Key": key} for key in batch], "Quiet": True},
                    **self.options.owner,
                )
                # Status 200 proves nothing here: only a whole ``DeleteResult`` shows that the keys are gone.
                answer = whole(request, lambda _: "", "a deletion")
            # S3 refuses single keys inside an answer with status 200; the SDK raises nothing for them.
            if problems := answer.get("Errors"):
                first = problems[0]
                raise StorageError(
                    f"{self.uri}: cannot delete {first.get('Key')!r}: {first.get('Code')} {first.get('Message')} "
                    f"({len(problems)} such keys). Needed: {self.needs('DeleteObject')}"
                )

    def abort_unfinished(self, before: float, prefix: str = "") -> int:
        """Abort multipart uploads below ``prefix`` that began before a time (seconds since the epoch, S3's clock)."""
        needed = f"s3:ListBucketMultipartUploads, {self.needs('AbortMultipartUpload')}"
        count = 0
        with s3_errors(self.uri, "abort uploads below", prefix, needed):
            pages = upload_pages(self.client, self.bucket, self.prefix + prefix, **self.options.owner)
            stale = [it for page in pages for it in page.get("Uploads") or () if it["Initiated"].timestamp() < before]
            for item in stale:
                count += self._abort(item["Key"], item["UploadId"])
        return count

    def _abort(self, full_key: str, upload: str) -> bool:
        from botocore.exceptions import ClientError

        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=full_key, UploadId=upload, **self.options.owner)
        except ClientError as error:
            # Another process, or the bucket's lifecycle rule, may have aborted it since it was listed.
            if code_of(error) != "NoSuchUpload":
                raise
            return False
        return True

    def needs(self, action: str) -> str:
        """The permission to do ``action`` with every object here, as an error names it."""
        return f"s3:{action} on arn:aws:s3:::{self.bucket}/{self.prefix}*"


def whole_checksum(answer: Mapping[str, Any]) -> str | None:
    """The CRC64NVME of a whole object in an answer of S3, as 16 hex digits, or None."""
    text = answer.get("ChecksumCRC64NVME")
    # This algorithm exists only over whole objects; a part count after a dash would be another thing.
    if not text or "-" in text:
        return None
    try:
        found = from_base64(text)
    except ValueError:
        # Fails the check of the length below, so that both kinds of nonsense raise one error.
        found = ""
    if len(found) != 16:
        raise AnswerError(f"the answer has the checksum {text!r}, which is not a CRC64NVME")
    return found


def _md5(answer: Mapping[str, Any]) -> str | None:
    """The MD5 of an object: its entity tag, unless it came in parts or is encrypted with a key of KMS or ours."""
    tag: str = answer["ETag"].strip('"')
    # S3 documents the entity tag as an MD5 only for objects stored in one piece, unencrypted or with SSE-S3.
    opaque = answer.get("ServerSideEncryption", "AES256") != "AES256" or "SSECustomerAlgorithm" in answer
    return tag if _MD5.fullmatch(tag) and not opaque else None


def to_base64(hexadecimal: str) -> str:
    """A checksum as S3 writes it."""
    return base64.b64encode(bytes.fromhex(hexadecimal)).decode()


def from_base64(text: str) -> str:
    """A checksum as we write it."""
    return base64.b64decode(text).hex()


def _batches(keys: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for key in keys:
        batch.append(key)
        if len(batch) == _DELETE_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
