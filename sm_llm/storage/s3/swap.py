"""Replaces an object in S3 only if it is still the one that was read, so that two writers lose no change."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.s3.listing import object_pages
from sm_llm.storage.s3.s3_client import code_of, header, s3_errors, small_body, status_of
from sm_llm.storage.stored_names import usable

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.s3.s3_objects import S3Objects

_TRIES = 20


@dataclass(frozen=True)
class Tagged:
    """An object's bytes, and the tag that changes when they do. ``tag`` None with no bytes: there is no such object."""

    body: bytes = b""
    tag: str | None = None


def read_tagged(store: S3Objects, key: str) -> Tagged:
    """What is stored under ``key`` now. Raises ``StorageError`` if the store does not answer."""
    from botocore.exceptions import ClientError

    with s3_errors(store.uri, "read", key, f"s3:GetObject on arn:aws:s3:::{store.bucket}/{store.prefix}*"):
        try:
            answer = store.client.get_object(**store.at(key))
            return Tagged(small_body(answer, store.uri, key), header(answer, "ETag", str).strip('"'))
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                return Tagged()
            raise


def swap(store: S3Objects, key: str, body: bytes, tag: str | None) -> str | None:
    """Store ``body`` if the object still has ``tag`` (None: if it does not exist); returns the new tag.

    None if somebody else has changed it. A lost answer is settled by reading back: our own bytes are a success.
    Raises ``StorageError`` if the store does not answer, or cannot replace conditionally (``If-Match``).
    """
    from botocore.exceptions import ClientError

    condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": f'"{tag}"'}
    with s3_errors(store.uri, "replace", key, f"s3:PutObject on arn:aws:s3:::{store.bucket}/{store.prefix}*"):
        try:
            return store.put(key, body, **condition)
        except ClientError as error:
            # 412: changed or there already; 409: two writers at once; 404: gone, so nothing has that tag.
            if status_of(error) not in (404, 409, 412) or code_of(error) == "NoSuchBucket":
                raise
    # The SDK repeats a request whose answer was lost. The repetition is then refused because of our own first write.
    found = read_tagged(store, key)
    return found.tag if found.body == body else None


def change(store: S3Objects, key: str, edit: Callable[[Tagged], bytes]) -> bytes:
    """Read, ``edit`` and replace until nobody got in between; returns what is stored now. ``edit`` may raise."""
    for attempt in range(_TRIES):
        found = read_tagged(store, key)
        body = edit(found)
        if swap(store, key, body, found.tag) is not None:
            return body
        time.sleep(random.uniform(0, min(1.0, 0.02 * 2**attempt)))
    raise StorageError(f"{store.uri}: cannot change {key!r}: other writers were in the way {_TRIES} times")


def folders(store: S3Objects, prefix: str = "") -> list[str]:
    """Names of the folders right below the store that begin with ``prefix``, in one listing that enters none.

    Folders that no path could have as its name are left out, and reported once.
    """
    with s3_errors(store.uri, "list", prefix, f"s3:ListBucket on arn:aws:s3:::{store.bucket}"):
        begin = store.prefix + prefix
        pages = object_pages(store.client, store.bucket, begin, Delimiter="/", **store.options.owner)
        found = [it["Prefix"] for page in pages for it in page.get("CommonPrefixes") or ()]
    return sorted(usable((name[len(store.prefix) :].removesuffix("/") for name in found), store.uri))
