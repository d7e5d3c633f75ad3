"""Objects of S3 that are read by ranges: what breaks off is taken up again, and what was replaced is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError, ResponseStreamingError

from sm_llm.errors import StorageError
from sm_llm.storage.base import MissingObjectError, StoredObject, WrongContentError
from sm_llm.storage.engines import ranged_object
from sm_llm.storage.engines.ranged_object import RangedObject
from sm_llm.storage.s3.s3_objects import S3Objects

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = bytes(range(200))


class Answers(S3Objects):
    """Answers a GET by ``plan``: None with all bytes, a number with as many before it breaks off, or an error."""

    def __init__(self, *plan: Any) -> None:
        super().__init__("bucket", "prefix")
        self.plan = list(plan)
        self.asked: list[tuple[str, str]] = []
        self.renewed = 0
        self._connected = None, SimpleNamespace(get_object=self.answer)

    def require(self, key: str) -> StoredObject:
        return StoredObject(key, len(BODY), tag="one")

    def renew(self) -> None:
        self.renewed += 1

    def answer(self, **request: str) -> dict[str, Any]:
        self.asked.append((request["Range"], request["IfMatch"]))
        begin, end = map(int, request["Range"].removeprefix("bytes=").split("-"))
        found = self.plan.pop(0) if self.plan else None
        if isinstance(found, Exception):
            raise found
        body = BODY[begin : end + 1]
        if isinstance(found, bytes):
            body = found
        return {"ContentLength": len(body), "Body": SimpleNamespace(iter_chunks=lambda _: pieces(body, found))}


def pieces(body: bytes, breaks_at: Any) -> Iterator[bytes]:
    if isinstance(breaks_at, int):
        yield body[:breaks_at]
        raise ResponseStreamingError(error="reset by peer")
    yield body


def refused(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")  # type: ignore[typeddict-item]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged_object.time, "sleep", lambda _: None)


def read(answers: Answers, begin: int = 10, end: int = 150) -> bytes:
    return RangedObject(answers, "key").read(begin, end)


def test_what_breaks_off_is_taken_up_where_it_ended() -> None:
    answers = Answers(30, 0, refused(503, "SlowDown"), None)
    assert read(answers) == BODY[10:150]
    assert answers.asked == [("bytes=10-149", "one"), *[("bytes=40-149", "one")] * 3]


def test_progress_ends_the_counting_of_failures() -> None:
    answers = Answers(*[1] * 20)
    assert read(answers) == BODY[10:150]


def test_a_store_that_only_fails_is_given_up() -> None:
    answers = Answers(*[refused(503, "SlowDown")] * 9)
    with pytest.raises(StorageError, match="SlowDown"):
        read(answers)
    assert len(answers.asked) == 5


def test_expired_credentials_are_renewed() -> None:
    answers = Answers(refused(400, "ExpiredToken"))
    assert read(answers) == BODY[10:150]
    assert answers.renewed == 1


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (refused(412, "PreconditionFailed"), WrongContentError, "was replaced while it was read"),
        (refused(404, "NoSuchKey"), MissingObjectError, "does not exist any more"),
        (refused(403, "AccessDenied"), StorageError, "AccessDenied"),
        (BODY, WrongContentError, "answered with 200 bytes instead of 140"),
    ],
)
def test_what_another_try_would_only_repeat_is_final(answer: Any, error: type[Exception], text: str) -> None:
    answers = Answers(answer)
    with pytest.raises(error, match=text):
        read(answers)
    assert len(answers.asked) == 1
