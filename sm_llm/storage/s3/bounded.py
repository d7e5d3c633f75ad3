"""Bounds what one answer of a store may cost: its time as a whole, and its size where it is read into memory.

The SDK's own timeouts begin anew with every byte, and it reads an answer of any size. A store that sends one byte a
minute, or a page without end, would keep a job for ever.
"""

from __future__ import annotations

import threading
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
    from botocore.exceptions import ReadTimeoutError

    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="s3-answer", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        late = ReadTimeoutError(endpoint_url=endpoint)
        late.args = (f"no whole answer from {endpoint} within {seconds:g} s",)
        raise late
    return results[0]


class BoundedSession:
    """The SDK's HTTP session. Its answers come within ``seconds``, those that are read at once in ``MOST_BYTES``.

    Uploads of files take as long as their bytes need.
    """

    def __init__(self, session: Any, seconds: float) -> None:
        self._session = session
        self._seconds = seconds

    def send(self, request: Any) -> Any:
        """The answer to a prepared request."""
        if not isinstance(request.body, bytes | bytearray | str | None):
            return self._session.send(request)
        is_streamed, request.stream_output = request.stream_output, True
        return within(self._seconds, lambda: self._answer(request, is_streamed), request.url)

    def _answer(self, request: Any, is_streamed: bool) -> Any:
        from botocore.awsrequest import AWSResponse

        answer = self._session.send(request)
        if is_streamed and answer.status_code < 300:  # an object's body; of an error all is read here, too
            return answer
        chunks, size = [], 0
        for chunk in answer.raw.stream(_CHUNK):
            chunks.append(chunk)
            size += len(chunk)
            if size > MOST_BYTES:
                raise ValueError(f"an answer of more than {MOST_BYTES:,} bytes, which no request has")
        return AWSResponse(answer.url, answer.status_code, answer.headers, _Read(b"".join(chunks)))

    def close(self) -> None:
        """Close the connections."""
        self._session.close()


class _Read:
    """A body that was read, as the SDK reads it."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._body
