"""What the engines share: where parts end, how uploads are described and read back, how errors are reported."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from sm_llm.errors import StorageError
from sm_llm.storage.base import MissingObjectError, StoredObject
from sm_llm.storage.s3.s3_client import answer_seconds, code_of, s3_errors
from sm_llm.storage.s3.s3_objects import S3Objects, to_base64

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sm_llm.storage.base import Copy, Progress, Store

MIB = 1 << 20
MAX_PARTS = 10_000
CANCEL_SECONDS = 5.0
"""How long a cancelled engine may take to come to rest before it is left alone."""

SLOWEST_BYTES_PER_SECOND = 256 * 1024
"""Of an engine that is another program's code and reports no stall: it has to be faster on the whole. The engines that
take its place bound every piece of a file instead."""
_CLOCK_SLACK = 3600.0
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class DiskError(StorageError):
    """The local disk failed: moving the bytes again would not help."""


def s3(store: Store) -> S3Objects:
    """``store``, which must be in S3: engines for it are never given another."""
    assert isinstance(store, S3Objects)
    return store


def part_size(size: int, smallest: int = 8 * MIB) -> int:
    """Bytes per part of a file of ``size`` bytes: at most 10,000 parts, in whole MiB, few requests for large files."""
    wanted = max(smallest, min(64 * MIB, size // 64), -(-size // MAX_PARTS))
    return -(-wanted // MIB) * MIB


def most_seconds(store: S3Objects, copies: Sequence[Copy]) -> float:
    """How long an engine that cannot tell a stall may take for ``copies``."""
    return answer_seconds(store.client) + sum(it.size for it in copies) / SLOWEST_BYTES_PER_SECOND


def upload_arguments(store: S3Objects, copy: Copy) -> dict[str, Any]:
    """The checksum of the whole object, which S3 compares with what it got, and how the object is to be kept."""
    return {"ChecksumCRC64NVME": to_base64(copy.crc64nvme), **store.options.writing}


@contextmanager
def copy_errors(store: S3Objects, action: str, copy: Copy) -> Iterator[None]:
    """What S3 answers to one copy of s3transfer (``fetch`` or ``store``), as errors of ours that name the object."""
    from botocore.exceptions import ClientError

    permission = "GetObject" if action == "fetch" else "PutObject"
    with s3_errors(store.uri, action, copy.key, store.needs(permission)):
        try:
            yield
        except ClientError as error:
            # 404 without a code is the answer to HEAD, with which s3transfer begins.
            if action == "fetch" and code_of(error) in ("NoSuchKey", "404"):
                raise MissingObjectError(f"{store.uri}: {copy.key!r} does not exist") from error
            raise


class Counter:
    """A subscriber of s3transfer that hands increments on."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_queued(self, **_: Any) -> None:
        """Nothing has moved yet."""

    def on_progress(self, bytes_transferred: int, **_: Any) -> None:
        self._progress(bytes_transferred)

    def on_done(self, **_: Any) -> None:
        """The future holds the outcome."""


def stored(store: S3Objects, copy: Copy) -> StoredObject:
    """What the store holds now under a copy's key; an object without CRC64NVME is read to know it."""
    # Asked anew: what counts is what the store holds, not what an engine reports to have sent.
    found = store.require(copy.key)
    checksum = found.crc64nvme or store.checksum(copy.key)
    return StoredObject(copy.key, found.size, checksum, found.modified, found.tag)


def each(workers: int, action: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """``action`` of every item in threads, results in order; the first error is raised and the rest is not begun."""
    if workers == 1 or len(items) < 2:
        return [action(it) for it in items]
    pool = ThreadPoolExecutor(min(workers, len(items)), thread_name_prefix="s3")
    futures = [pool.submit(action, it) for it in items]
    try:
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def cancel_and_wait(futures: Sequence[Future[Any]], cancel: Callable[[], object]) -> None:
    """Cancel and wait a bounded time."""
    cancel()
    wait(futures, timeout=CANCEL_SECONDS)


def abort_own_uploads(store: S3Objects, copies: Sequence[Copy]) -> None:
    """After an upload that was broken off: no part of it may stay behind. What cannot be aborted now is found later.

    Keys of one batch are its writer's own, so whatever is open below them is of this upload.
    """
    for copy in copies:
        try:
            # The store's clock may be ahead of this machine's. Everything below this key is ours, whenever it began.
            store.abort_unfinished(time.time() + _CLOCK_SLACK, copy.key)
        except StorageError:
            return
