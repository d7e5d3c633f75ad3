"""One object of S3, read by ranges without a copy of it on disk."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.base import MissingObjectError, WrongContentError
from sm_llm.storage.checksum import CHUNK_BYTES
from sm_llm.storage.engines.common import s3
from sm_llm.storage.s3.s3_client import code_of, header, is_expired, s3_errors, status_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.storage.base import Store

_TRIES = 5
_MISSING, _REPLACED = ("NoSuchKey",), 412
# Refusals that ask for another try.
_PASSING = (408, 429)


class RangedObject:
    """An object as it is now: ``size`` in bytes, and ``tag``, which changes when it is written again.

    Safe to share between threads. Raises ``MissingObjectError`` for a key that is not there, ``StorageError``.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = s3(store), key
        found = self._store.require(key)
        self.size, self.tag = found.size, found.tag or ""
        self.uri = f"{store.uri}/{key}"

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes ``[begin, end)``, a quarter of a MiB at a time; a connection that breaks off is taken up again.

        Raises ``StorageError`` if the store does not answer, and ``WrongContentError`` if the object was replaced.
        """
        position, failed = begin, 0
        while position < end:
            try:
                for piece in self._ask(position, end):
                    yield memoryview(piece)
                    position += len(piece)
                    # What arrives shows that the store is there: only failures in a row count.
                    failed = 0 if piece else failed
            except StorageError as error:
                failed += 1
                if failed == _TRIES or _is_final(error):
                    raise
                # A conversion may take longer than credentials are valid.
                if is_expired(error):
                    self._store.renew()
                time.sleep(random.uniform(0, 0.1 * 2**failed))

    def read(self, begin: int, end: int) -> bytes:
        """The same, joined."""
        return b"".join(self.pieces(begin, end))

    def _ask(self, begin: int, end: int) -> Iterator[bytes]:
        """One request. Yields at most the bytes that were asked for."""
        from botocore.exceptions import ClientError

        with s3_errors(self._store.uri, "read", self._key, self._store.needs("GetObject")):
            # ``IfMatch``: of an object that is replaced meanwhile no byte may be mixed with those before.
            request = {"Range": f"bytes={begin}-{end - 1}", **({"IfMatch": self.tag} if self.tag else {})}
            try:
                answer = self._store.client.get_object(**self._store.at(self._key), **request)
            except ClientError as error:
                if status_of(error) == _REPLACED:
                    raise WrongContentError(f"{self.uri} was replaced while it was read. Start again") from error
                if code_of(error) in _MISSING:
                    raise MissingObjectError(f"{self.uri} does not exist any more") from error
                raise
            # A server that ignores ``Range`` answers with the whole object.
            if (length := header(answer, "ContentLength", int)) != end - begin:
                raise WrongContentError(f"{self.uri} is answered with {length:,} bytes instead of {end - begin:,}")
            left = end - begin
            for piece in answer["Body"].iter_chunks(CHUNK_BYTES):
                if len(piece) > left:
                    raise WrongContentError(f"{self.uri} is answered with more bytes than were asked for")
                left -= len(piece)
                yield piece
            if left:
                raise StorageError(f"{self.uri} broke off {left:,} bytes before byte {end:,}")


def _is_final(error: StorageError) -> bool:
    """Whether another try would only repeat the error."""
    status = status_of(error.__cause__)
    refused = 400 <= status < 500 and status not in _PASSING
    return isinstance(error, MissingObjectError | WrongContentError) or (refused and not is_expired(error))
