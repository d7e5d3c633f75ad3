"""Listings of a bucket, believed only when they are complete: a wrong one must never look like an empty bucket.

A proxy, a captive portal or a broken store can answer 200 with something else. Every page must be a whole
``ListBucketResult`` or ``ListMultipartUploadsResult`` (Amazon S3 API Reference, "ListObjectsV2" and
"ListMultipartUploads") for the bucket and prefix that were asked for.
"""

from __future__ import annotations

import random
import time
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_llm.storage.base import LARGEST_BYTES
from sm_llm.storage.s3.listing_text import FAULT
from sm_llm.storage.s3.s3_client import NONSENSE, AnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

MOST_PAGES = 10_000
"""Pages of one listing."""
MOST_KEYS = 1000
"""Keys of one page."""
TRIES = 4
"""Requests for one page or deletion, while its answers are not whole."""
MOST_SECONDS = 3600.0
"""Of all pages of one listing together."""
_FIRST_PAUSE_SECONDS = 0.2
# Endings of access point aliases, for which S3 may echo the name of the bucket behind.
_ALIASES = ("-s3alias", "--ol-s3")


def object_pages(client: Any, bucket: str, prefix: str, **request: Any) -> Iterator[Mapping[str, Any]]:
    """Every page of the keys that begin with ``prefix``; ``request`` are further arguments of ``ListObjectsV2``.

    Raises ``AnswerError`` for answers that are not whole, after several tries, and for a listing without end.
    """
    seen: set[str] = set()
    held: set[str] = set()
    asked = {"Bucket": bucket, "Prefix": prefix, **request}
    for _ in _numbers("listing"):
        page = whole(
            partial(client.list_objects_v2, **asked),
            partial(_objects_problem, asked=asked, seen=seen, held=held),
            "a listing",
        )
        yield page
        if not page["IsTruncated"]:
            return
        # A store that repeats a page under a new token would list its keys twice.
        held.update(_keys(page))
        seen.add(page["NextContinuationToken"])
        asked = {**asked, "ContinuationToken": page["NextContinuationToken"]}


def first_objects(client: Any, bucket: str, prefix: str, count: int, **request: Any) -> Mapping[str, Any]:
    """One page of at most ``count`` keys that begin with ``prefix``, whole as in ``object_pages``."""
    asked = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": count, **request}
    return whole(partial(client.list_objects_v2, **asked), partial(_objects_problem, asked=asked), "a listing")


def upload_pages(client: Any, bucket: str, prefix: str, **request: Any) -> Iterator[Mapping[str, Any]]:
    """Every page of the unfinished multipart uploads of keys that begin with ``prefix``; raises as ``object_pages``."""
    seen: set[tuple[str, str]] = set()
    markers: dict[str, str] = {}
    for _ in _numbers("listing of uploads"):
        page = whole(
            partial(client.list_multipart_uploads, Bucket=bucket, Prefix=prefix, **request, **markers),
            lambda page: _uploads_problem(page, bucket, prefix, seen),
            "a listing",
        )
        yield page
        if not page["IsTruncated"]:
            return
        seen.add(_markers(page))
        markers = dict(zip(("KeyMarker", "UploadIdMarker"), _markers(page), strict=True))


def _numbers(what: str) -> Iterator[int]:
    """The pages that may still be asked for. Raises ``AnswerError`` when there are too many, or they take too long."""
    # Two bounds: a broken store may invent pages without end, and a slow one may outlast the job that lists.
    end = time.monotonic() + MOST_SECONDS
    for number in range(MOST_PAGES):
        if time.monotonic() > end:
            raise AnswerError(f"the {what} has not ended after {MOST_SECONDS:,.0f} s and {number:,} pages")
        yield number
    raise AnswerError(f"the {what} has more than {MOST_PAGES:,} pages")


def whole(
    ask: Callable[[], Mapping[str, Any]], problem_of: Callable[[Mapping[str, Any]], str], what: str
) -> Mapping[str, Any]:
    """The answer to a request that can be repeated. Raises ``AnswerError`` if none is whole, after several tries."""
    from botocore.parsers import ResponseParserError

    problem = ""
    for attempt in range(TRIES):
        if attempt:
            # Nodes of a job list at the same moment: random pauses keep their tries apart.
            time.sleep(random.uniform(0.5, 1) * _FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))
        try:
            answer = ask()
            # The raw text is checked first (``note_problems``): once parsed, a foreign body is like an empty listing.
            problem = answer[FAULT] or problem_of(answer)
        except ResponseParserError as error:
            problem = f"it is not XML ({str(error)[:200]})"
        except (*NONSENSE, TypeError) as error:  # the last of an element that is there twice
            problem = f"it holds a value that makes no sense ({str(error)[:200]})"
        if not problem:
            return answer
    raise AnswerError(
        f"the store answered {what} {TRIES} times with something else: {problem}. Is a proxy in between, or the "
        "endpoint not an S3 store?"
    )


def _objects_problem(
    page: Mapping[str, Any],
    asked: Mapping[str, Any],
    seen: Collection[str] = (),
    held: Collection[str] = (),
) -> str:
    """Why a page is not whole. ``seen`` are the tokens, ``held`` the keys and folders of the pages before it."""
    bucket, prefix, delimiter = asked["Bucket"], asked["Prefix"], asked.get("Delimiter", "")
    if problem := _frame_problem(page, page.get("Name"), bucket, prefix) or _echo_problem(page, asked):
        return problem
    token = page.get("NextContinuationToken")
    if page["IsTruncated"] and (not token or token in seen):
        return "it is truncated, and does not name where it continues"
    # A contradiction: to believe the flag could hide the remaining keys.
    if token and not page["IsTruncated"]:
        return "it is complete, and names where it continues"
    contents, folders = page.get("Contents") or (), page.get("CommonPrefixes") or ()
    if (count := page.get("KeyCount")) is not None and count != len(contents) + len(folders):
        return f"it counts {count} keys and holds {len(contents) + len(folders)}"
    if len(contents) + len(folders) > asked.get("MaxKeys", MOST_KEYS):
        return "it holds more keys than were asked for"
    for name in (str(it.get("Prefix", "")) for it in folders):
        if not delimiter or not name.startswith(prefix) or not name.endswith(delimiter) or name == prefix:
            return "it holds folders that were not asked for"
    if delimiter and any(delimiter in str(it.get("Key", ""))[len(prefix) : -1] for it in contents):
        return "it holds keys inside folders, which were not asked for"
    if repeated := next((key for key in _keys(page) if key in held), None):
        return f"it holds {repeated!r}, as an earlier page does"
    return next((problem for it in contents if (problem := _object_problem(it, prefix))), "")


def _keys(page: Mapping[str, Any]) -> Iterator[str]:
    yield from (it["Key"] for it in page.get("Contents") or ())
    yield from (it["Prefix"] for it in page.get("CommonPrefixes") or ())


def _echo_problem(page: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """What of the request an answer repeats must be that request's: a cache may have answered another one."""
    for name in ("Delimiter", "ContinuationToken", "StartAfter"):
        if (echo := page.get(name) or "") not in ("", asked.get(name, "")):
            return f"it answers another request, with the {name} {echo!r}"
    most = page.get("MaxKeys")
    if most is not None and not (0 < most == asked.get("MaxKeys", most)):
        return f"it answers a request for {most} keys"
    return ""


def _object_problem(item: Mapping[str, Any], prefix: str) -> str:
    key, size = item.get("Key"), item.get("Size")
    if not isinstance(key, str) or not key.startswith(prefix):
        return f"it holds the key {key!r}, which was not asked for"
    if (
        not isinstance(size, int)
        or not 0 <= size <= LARGEST_BYTES
        or not isinstance(item.get("LastModified"), datetime)
    ):
        return f"{key!r} has no size or no time"
    return ""


def _uploads_problem(page: Mapping[str, Any], bucket: str, prefix: str, seen: set[tuple[str, str]]) -> str:
    if problem := _frame_problem(page, page.get("Bucket"), bucket, prefix):
        return problem
    if page["IsTruncated"] and (not all(_markers(page)) or _markers(page) in seen):
        return "it is truncated, and does not name where it continues"
    for item in page.get("Uploads") or ():
        if not str(item.get("Key", "")).startswith(prefix):
            return f"it holds an upload of {item.get('Key')!r}, which was not asked for"
        if not item.get("UploadId") or not isinstance(item.get("Initiated"), datetime):
            return f"the upload of {item['Key']!r} has no id or no time"
    return ""


def _frame_problem(page: Mapping[str, Any], name: Any, bucket: str, prefix: str) -> str:
    if not name or (name != bucket and not bucket.endswith(_ALIASES)):
        return f"it is not a listing of the bucket {bucket!r}" + (f", but of {name!r}" if name else "")
    if (page.get("Prefix") or "") != prefix:
        return f"it lists {page.get('Prefix')!r} instead of {prefix!r}"
    return ""


def _markers(page: Mapping[str, Any]) -> tuple[str, str]:
    return page.get("NextKeyMarker") or "", page.get("NextUploadIdMarker") or ""
