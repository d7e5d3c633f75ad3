"""The stable address of a run's result: ``RUN/result``, known before the run begins, whatever save was committed.

The files lie below the committed save, in a folder that only the commit names. ``RUN/result/train`` is resolved through
the newest final commit, so it is never half-written: before the commit it is an error, after it the whole result. In S3
``RUN/result/published.json`` is stored after the commit. It makes the prefix exist for whoever mounts it as a channel,
and names the files.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.publication.find import find_final
from sm_llm.storage.publication.keys import FINAL
from sm_llm.storage.s3.s3_client import code_of
from sm_llm.storage.uri import flattened, is_s3, join, open_store, parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.manifest import CommitManifest
    from sm_llm.storage.s3.s3_options import S3Options

RESULT = "result"
"""Below a run's address it stands for what the run has published."""
POINTER = "published.json"
"""A few bytes that name a result: in the model folder of a container, and in S3 under the stable address."""
_RECORD = "run.json"
_DENIED = ("AccessDenied", "403", "Forbidden")


class NotPublished(StorageError):
    """The run exists and has published nothing yet."""


def result_address(uri: str, options: S3Options | Mapping[str, Any] | None = None) -> str:
    """The address of the files that ``uri`` means; itself, unless it lies below the result of a run.

    Raises ``NotPublished`` for a run that has no result yet, ``CheckpointError`` for a damaged one, ``StorageError``
    where the store does not answer.
    """
    text = flattened(uri.rstrip("/"))
    parts = f"{text}/".split(f"/{RESULT}/")
    for end in range(1, len(parts)):  # folders above a run may have this name, too
        run, rest = f"/{RESULT}/".join(parts[:end]), f"/{RESULT}/".join(parts[end:]).rstrip("/")
        if not run or run == "s3:/":
            continue
        store = open_store(run, options)
        if not _is_run(store, run):
            continue
        commit = find_final(store)
        if commit is None:
            raise NotPublished(f"{uri}: the run has not published a result")
        return join(run, commit.save.data_prefix.rstrip("/"), rest)
    return uri


def _is_run(store: Store, address: str) -> bool:
    folder = parse(address).path
    if folder is not None:
        return (folder / _RECORD).is_file() or (folder / FINAL.commit_key).is_file()
    try:
        return store.head(_RECORD) is not None or store.head(FINAL.commit_key) is not None
    except StorageError as error:
        if code_of(error.__cause__) in _DENIED:
            return False  # only what lies below may be read, so it is read as it is named
        raise


def pointer_text(store: Store, commit: CommitManifest) -> str:
    """The text of a pointer to a run's result: the stable address, and where the files of ``commit`` lie."""
    uri = join(store.uri, commit.save.data_prefix.rstrip("/"))
    pointer = {"result": join(store.uri, RESULT), "uri": uri, "run_id": commit.run_id}
    return json.dumps({**pointer, "bytes": commit.size, "digest": commit.digest}, indent=2) + "\n"


def leave_pointer(store: Store, commit: CommitManifest) -> None:
    """Make the stable address of a published result exist in S3; a folder has the commit and needs none.

    The text follows from the commit alone, so it does not matter how often, or by whom, it is stored.
    """
    if is_s3(store.uri):
        store.put_if_absent(f"{RESULT}/{POINTER}", pointer_text(store, commit).encode())


def pointed(folder: Path) -> str | None:
    """The address that a mounted folder points at, if all that it holds is a pointer.

    So it is where the channel is the stable address of a run, or the model artifacts of its training job.
    """
    if not folder.is_dir() or [it.name for it in folder.iterdir()] != [POINTER]:
        return None
    try:
        found = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        address = str(found["result"]) if {"result", "run_id", "digest"} <= set(found) else ""
    # Whoever fills a channel may have a file of this name: whatever is not a pointer of ours is data.
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return address if address.endswith(f"/{RESULT}") else None
