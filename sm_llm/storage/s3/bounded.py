"""Bounds what one answer of a store may cost: its time as a whole, and its size where it is read into memory.

The SDK's own timeouts begin anew with every byte, and it reads an answer of any size. A store that sends one byte a
minute, or a page without end, would keep a job for ever. Of an object's body, every piece is bounded.
"""

from __future__ import annotations

import threading
import time
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_BYTES = 16 << 20
"""Of an answer that is not an object's body: a page of a listing has at most 1,000 keys of 1,024 bytes."""
_CHUNK = 1 << 16
_Result = TypeVar("_Result")


def within(seconds: float, action: Callable[[], _Result], endpoint: str) -> _Result:
    """What ``action`` returns or raises. Raises the SDK's ``ReadTimeoutError`` if it takes longer.

    Then its thread is left to itself: it ends with the connection, or with this process.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        # Kept for the caller's thread: an exception in any other thread is only printed.
        except BaseException as error:
            errors.append(error)

    # A new thread does not inherit context variables, which the SDK and this package both use. It is a daemon because a
    # store that never answers must not keep this process from ending.
    thread = threading.Thread(target=copy_context().run, args=(run,), name="s3-answer", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise _late(f"no whole answer from {endpoint} within {seconds:g} s", endpoint)
    return results[0]


def _late(problem: str, endpoint: str) -> Exception:
    from botocore.exceptions import ReadTimeoutError

    late: Exception = ReadTimeoutError(endpoint_url=endpoint)
    late.args = (problem,)
    return late


class BoundedSession:
    """The SDK's HTTP session. Its answers come within ``seconds``, those that are read at once in ``MOST_BYTES``.

    So does every piece of an object's body. Uploads of files take as long as their bytes need.
    """

    def __init__(self, session: Any, seconds: float) -> None:
        self._session = session
        self._seconds = seconds

    def send(self, request: Any) -> Any:
        """The answer to a prepared request."""
        # The body is a file: how long it takes depends on its size, so only the SDK's timeouts between bytes apply.
        if not isinstance(request.body, bytes | bytearray | str | None):
            return self._session.send(request)
        # Streamed in any case, so that the body is read here, in bounded pieces, and not by the SDK as a whole.
        is_streamed, request.stream_output = request.stream_output, True
        return within(self._seconds, lambda: self._answer(request, is_streamed), request.url)

    def _answer(self, request: Any, is_streamed: bool) -> Any:
        from botocore.awsrequest import AWSResponse

        answer = self._session.send(request)
        if is_streamed and answer.status_code < 300:  # an object's body; of an error all is read here, too
            answer.raw = _Pieces(answer.raw, self._seconds, request.url)
            return answer
        body = _whole(answer.raw, request)
        return AWSResponse(answer.url, answer.status_code, answer.headers, _Read(body))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()


def _whole(raw: Any, request: Any) -> bytes:
    """All that comes. Errors of the connection are those of the SDK, which tries again."""
    from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
    from urllib3.exceptions import HTTPError
    from urllib3.exceptions import ReadTimeoutError as PieceIsLate

    chunks, size = [], 0
    try:
        for chunk in raw.stream(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            if size > MOST_BYTES:
                raise ValueError(f"an answer of more than {MOST_BYTES:,} bytes, which no request has")
    except PieceIsLate as error:
        raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
    except HTTPError as error:
        raise ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from error
    return b"".join(chunks)


class _Pieces:
    """The body of an object, as the SDK reads it. A piece that takes longer than ``seconds`` is an error."""

    def __init__(self, raw: Any, seconds: float, endpoint: str) -> None:
        self._raw, self._seconds, self._endpoint = raw, seconds, endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def read(self, amt: int | None = None) -> bytes:
        """``amt`` bytes, fewer at the end; None reads all that is left, as one piece."""
        read_some = getattr(self._raw, "read1", None)  # what is there, unlike ``read``, which waits for all of it
        if amt is None or read_some is None:  # urllib3 before version 2 has none
            whole: bytes = within(self._seconds, lambda: self._raw.read(amt), self._endpoint)
            return whole
        end, left = time.monotonic() + self._seconds, amt
        parts: list[bytes] = []
        while left and (part := read_some(left)):
            parts.append(part)
            left -= len(part)
            if left and time.monotonic() > end:
                raise _late(f"{amt:,} bytes of an object did not come within {self._seconds:g} s", self._endpoint)
        return b"".join(parts)


class _Read:
    """A body that was read, as the SDK reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._body
