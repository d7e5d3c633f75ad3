"""Our own ranged downloads: resumable inside a file, progress by the byte, a bandwidth cap, credentials renewed."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.arrival import is_half_fetched, journal_of
from sm_llm.storage.base import MissingObjectError, WrongContentError
from sm_llm.storage.checksum import CHUNK_BYTES
from sm_llm.storage.engines.common import MIB, DiskError, s3
from sm_llm.storage.s3.s3_client import code_of, header, is_expired, s3_errors, status_of
from sm_llm.storage.s3.s3_objects import whole_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.storage.base import Copy, Progress, Store
    from sm_llm.storage.s3.s3_objects import S3Objects

RANGE_BYTES = 32 * MIB
_TRIES = 5


class _Stopped(Exception):
    """Another range failed, or the caller was interrupted."""


class RangesTransfer:
    """``ranges``: downloads only. ``max_bandwidth`` in bytes per second, over all files.

    A file of several ranges keeps a journal beside it, which stays until ``arrival.accept``. What an interrupted
    download left is continued if the object still has the same tag, size and checksum.
    """

    name = "ranges"

    def __init__(self, max_bandwidth: int | None = None, workers: int = 8) -> None:
        self._limiter = _Limiter(max_bandwidth)
        self._workers = workers

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        session = _Session(s3(store), progress, self._limiter)
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="ranges")
        files: list[_File] = []
        try:
            futures = [pool.submit(session.fetch_whole, copy) for copy in copies if copy.size <= RANGE_BYTES]
            for copy in (it for it in copies if it.size > RANGE_BYTES):
                files.append(session.open(copy))
                futures += [pool.submit(session.fetch_range, files[-1], start) for start in files[-1].missing]
            _raise_first(futures)
        finally:
            # Threads that read a body end with their next chunk.
            session.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for file in files:
                # Only now, when no thread writes any more: the number of a closed descriptor may belong to another
                # file.
                os.close(file.descriptor)
        return session.checksums


def _raise_first(futures: Sequence[Future[None]]) -> None:
    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
        future.result()


@dataclass
class _File:
    """One file in the making: its open ``.part``, and the starts of the ranges that are in it."""

    copy: Copy
    tag: str | None
    descriptor: int
    done: set[int]
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def missing(self) -> list[int]:
        return [start for start in range(0, self.copy.size, RANGE_BYTES) if start not in self.done]

    def end(self, start: int) -> int:
        return min(start + RANGE_BYTES, self.copy.size)

    def note(self, start: int) -> None:
        """Write down that a range is in the file."""
        # Not flushed. After a power failure the journal may claim too much; the checksum of the whole file decides.
        with self.lock, journal_of(self.copy.path).open("a", encoding="utf-8") as stream:
            stream.write(f"{start}\n")


@dataclass
class _Session:
    """One call of ``download``."""

    store: S3Objects
    progress: Progress
    limiter: _Limiter
    stop: threading.Event = field(default_factory=threading.Event)
    checksums: dict[str, str] = field(default_factory=dict)

    def open(self, copy: Copy) -> _File:
        """Open a file of several ranges, continuing what is there if it is of the same object."""
        found = self.store.require(copy.key)
        if found.size != copy.size:
            raise WrongContentError(f"{self.store.uri}: {copy.key!r} has {found.size} bytes instead of {copy.size}")
        if found.crc64nvme:
            self.checksums[copy.key] = found.crc64nvme
        # What a journal must agree with to be continued: the same ranges, of the same object.
        identity = json.dumps([RANGE_BYTES, copy.size, found.tag, found.crc64nvme or copy.crc64nvme])
        try:
            done = _finished(copy, identity)
            descriptor = _open(copy, os.O_WRONLY | os.O_CREAT | (0 if done else os.O_TRUNC))
            if not done:
                journal_of(copy.path).write_text(f"{identity}\n", encoding="utf-8")
        except OSError as error:
            raise self._disk_error(copy, error) from error
        file = _File(copy, found.tag, descriptor, done)
        self.progress(sum(file.end(start) - start for start in done))
        return file

    def fetch_whole(self, copy: Copy) -> None:
        """A file small enough for one request, whose answer holds the checksum too."""
        try:
            descriptor = _open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            raise self._disk_error(copy, error) from error
        try:
            answer = self._insist(copy, descriptor, 0, copy.size, {"ChecksumMode": "ENABLED"})
        finally:
            os.close(descriptor)
        if checksum := whole_checksum(answer):
            self.checksums[copy.key] = checksum

    def fetch_range(self, file: _File, start: int) -> None:
        end = file.end(start)
        # ``IfMatch``: an object that is replaced meanwhile answers 412, and never as a mixture of two.
        request = {"Range": f"bytes={start}-{end - 1}"} | ({"IfMatch": file.tag} if file.tag else {})
        self._insist(file.copy, file.descriptor, start, end, request)
        file.note(start)

    def _insist(self, copy: Copy, descriptor: int, start: int, end: int, request: dict[str, str]) -> dict[str, Any]:
        """Fetch until all bytes are there: the SDK repeats requests, but not bodies that break off."""
        for attempt in range(_TRIES):
            try:
                with s3_errors(self.store.uri, "fetch", copy.key, "s3:GetObject"):
                    return self._fetch(copy, descriptor, start, end, request)
            except StorageError as error:
                if attempt == _TRIES - 1 or _is_final(error):
                    raise
                if is_expired(error):
                    self.store.renew()
            time.sleep(random.uniform(0, 0.1 * 2**attempt))
        raise AssertionError("unreachable")

    def _fetch(self, copy: Copy, descriptor: int, start: int, end: int, request: dict[str, str]) -> dict[str, Any]:
        from botocore.exceptions import FlexibleChecksumError

        answer = self._ask(copy, request)
        length = header(answer, "ContentLength", int)
        # A server that ignores ``Range`` answers with the whole object, which must not be written at ``start``.
        if length != end - start:
            location = f"{self.store.uri}: {copy.key!r}"
            raise WrongContentError(f"{location} is answered with {length:,} bytes instead of {end - start:,}")
        position = start
        try:
            for chunk in answer["Body"].iter_chunks(CHUNK_BYTES):
                if self.stop.is_set():
                    raise _Stopped
                self.limiter.take(len(chunk))
                self._write(copy, descriptor, chunk, position)
                position += len(chunk)
                self.progress(len(chunk))
            if position != end:
                raise StorageError(f"{self.store.uri}: {copy.key!r} broke off after {position} of {copy.size} bytes")
        # The bytes of a request that fails come again, so they are subtracted from the progress.
        except FlexibleChecksumError as error:
            self.progress(start - position)
            raise WrongContentError(f"{self.store.uri}: {copy.key!r} arrives damaged: {error}") from error
        except BaseException:
            self.progress(start - position)
            raise
        return answer

    def _ask(self, copy: Copy, request: dict[str, str]) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        if self.stop.is_set():
            raise _Stopped
        try:
            answer: dict[str, Any] = self.store.client.get_object(**self.store.at(copy.key), **request)
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                raise MissingObjectError(f"{self.store.uri}: {copy.key!r} does not exist") from error
            raise
        return answer

    def _write(self, copy: Copy, descriptor: int, chunk: bytes, position: int) -> None:
        view = memoryview(chunk)
        try:
            while view:
                # Without a shared position, so that threads can write to one descriptor. It may write less than it is
                # given.
                written = os.pwrite(descriptor, view, position)
                view, position = view[written:], position + written
        except OSError as error:
            raise self._disk_error(copy, error) from error

    def _disk_error(self, copy: Copy, error: OSError) -> DiskError:
        return DiskError(f"{self.store.uri}: cannot fetch {copy.key!r} to {copy.path}: {error}")


class _Limiter:
    """Lets at most ``rate`` bytes per second pass, over all threads; None lets everything pass."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + count / self._rate
            pause = self._free_at - now
        # The time is reserved under the lock and waited for outside of it, so that other threads can reserve theirs.
        time.sleep(pause)


def _open(copy: Copy, flags: int) -> int:
    copy.path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(copy.path, flags, 0o666)


def _is_final(error: StorageError) -> bool:
    status = status_of(error.__cause__)
    # 408 and 429 ask for another try; any other refusal would only repeat itself.
    refused = 400 <= status < 500 and status not in (408, 429)
    return isinstance(error, DiskError | MissingObjectError) or (refused and not is_expired(error))


def _finished(copy: Copy, identity: str) -> set[int]:
    """Starts of the ranges an earlier download has finished; a last line without its end does not count."""
    if not is_half_fetched(copy.path):
        return set()
    head, *lines = journal_of(copy.path).read_text(encoding="utf-8").split("\n")
    if head != identity:
        return set()
    starts = {int(line) for line in lines[:-1] if line.isdigit()}
    size = copy.path.stat().st_size
    # Of a file that was cut the journal still lists ranges that are gone.
    return {start for start in starts if min(start + RANGE_BYTES, copy.size) <= size}
