"""Shows other machines that an attempt of this machine is running: an object in S3 that is stored again while it is."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.runs.run_record import MOST_ATTEMPTS
from sm_llm.storage.s3.s3_client import AnswerError, code_of, header, s3_errors
from sm_llm.storage.s3.swap import read_tagged, swap
from sm_llm.storage.s3_store import S3Store

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = "alive"
# Five beats fit into SILENT_SECONDS, so that a few lost ones do not end a run.
BEAT_SECONDS = 15.0
SILENT_SECONDS = 75.0
"""Without a sign of life for so long, by the store's clock, an attempt is taken for dead."""
CONFIG: dict[str, Any] = {
    "connect_timeout": 4,
    "read_timeout": 8,
    "retries": {"mode": "standard", "total_max_attempts": 2},
}
"""Of beats: a store that hangs for some seconds costs one of them, and the next comes long before silence is death."""
# Of a conditional write: each failure means that another writer stored a beat in between.
_TRIES = 5


def impatient(store: S3Store) -> S3Store:
    """The same store for beats, over a connection of its own."""
    return S3Store(store.bucket, store.prefix, store.options, CONFIG)


def silence(store: S3Store) -> float | None:
    """Seconds since the last beat, both by the store's own clock; None if there never was one."""
    from botocore.exceptions import ClientError

    with s3_errors(store.uri, "look up", KEY, f"s3:GetObject on arn:aws:s3:::{store.bucket}/{store.prefix}*"):
        try:
            answer = store.client.head_object(**store.at(KEY))
        except ClientError as error:
            if code_of(error) in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        try:
            now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
            return float((now - header(answer, "LastModified", datetime)).total_seconds())
        except (KeyError, ValueError, TypeError, OverflowError):  # a time without its zone is the third
            raise AnswerError("the answer has no usable Date") from None


@dataclass
class Heartbeat:
    """The beats of one attempt. ``on_superseded`` is called when a later attempt turns out to have begun elsewhere."""

    store: S3Store
    attempt: int
    on_superseded: Callable[[], None] = lambda: None
    _tag: str | None = None
    _due: float = 0.0

    def beat(self, *, at_once: bool = False) -> None:
        """Store the next beat if it is due. Raises ``StorageError``."""
        now = time.monotonic()
        if now < self._due and not at_once:
            return
        for _ in range(_TRIES):
            self._tag = swap(self.store, KEY, self._body(), self._tag)
            if self._tag is not None:
                # Counted from before the request, so that a slow store does not stretch the interval.
                self._due = now + BEAT_SECONDS
                return
            # Somebody else has stored a beat. A later attempt's ends this one; an older one's is replaced in the next
            # round.
            found = read_tagged(self.store, KEY)
            if found.tag is not None and _attempt_in(found.body) > self.attempt:
                self.on_superseded()
                return
            self._tag = found.tag
        raise StorageError(f"{self.store.uri}: {KEY!r} cannot be stored: other writers were in the way {_TRIES} times")

    def _body(self) -> bytes:
        # The time makes every beat another body, so that a lost answer differs from another writer's heartbeat.
        return json.dumps({"attempt": self.attempt, "host": socket.gethostname(), "time": time.time()}).encode()


def _attempt_in(body: bytes) -> int:
    try:
        number = json.loads(body)["attempt"]
    # Anybody who may write to the storage may have stored this: it is data, and may be nested too deep to parse.
    except (ValueError, KeyError, TypeError, RecursionError):
        return 0
    return number if type(number) is int and number <= MOST_ATTEMPTS else 0
