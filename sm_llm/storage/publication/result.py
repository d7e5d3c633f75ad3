"""The stable address of a run's result: ``RUN/result``, known before the run begins, whatever save was committed.

The files lie below the committed save, in a folder that only the commit names. ``RUN/result/train`` is resolved through
the newest final commit, so it is never half-written: before the commit it is an error, after it the whole result. In S3
``RUN/result/published.json``, and one in each folder below, is stored after the commit. It makes the prefix exist for
whoever mounts it as a channel, and names the files.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.storage.publication.find import find_final
from sm_llm.storage.publication.keys import FINAL
from sm_llm.storage.s3.s3_client import code_of
from sm_llm.storage.stored_names import usable
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
# Folders of a result that have a pointer of their own, those near its root first: each is a request.
_MOST_POINTERS = 64
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


def pointers(store: Store, commit: CommitManifest) -> dict[str, str]:
    """Pointers to a run's result, and to each folder in it: their paths below the stable address, and their texts."""
    above = {PurePosixPath(entry.path).parent for entry in commit.files}
    folders = {"" if it == PurePosixPath() else it.as_posix() for path in above for it in (path, *path.parents)}
    nearest = sorted(folders, key=lambda it: (it.count("/") + bool(it), it))[:_MOST_POINTERS]
    return {f"{folder}/{POINTER}".lstrip("/"): _pointer(store, commit, folder) for folder in nearest}


def _pointer(store: Store, commit: CommitManifest, folder: str) -> str:
    """The stable address of a folder of the result, and where the files of ``commit`` lie that it stands for."""
    uri = join(store.uri, commit.save.data_prefix.rstrip("/"), folder)
    pointer = {"result": join(store.uri, RESULT, folder), "uri": uri, "run_id": commit.run_id}
    return json.dumps({**pointer, "bytes": commit.size, "digest": commit.digest}, indent=2) + "\n"


def leave_pointers(store: Store, commit: CommitManifest) -> None:
    """Make the stable addresses of a published result exist in S3; a folder has the commit and needs none.

    The texts follow from the commit alone, so it does not matter how often, or by whom, they are stored.
    """
    for path, text in pointers(store, commit).items() if is_s3(store.uri) else ():
        store.put_if_absent(f"{RESULT}/{path}", text.encode())


def remove_pointers(store: Store) -> None:
    """Take them away: the result that they name does not stand for the run any more."""
    if is_s3(store.uri):
        found = [it.key for it in store.list(f"{RESULT}/") if it.key.endswith(f"/{POINTER}")]
        store.delete(usable(found, store.uri))


def pointed(folder: Path) -> str | None:
    """The address that a mounted folder points at, if all that it holds are pointers.

    So it is where the channel is the stable address of a run, or the model artifacts of its training job.
    """
    if not holds_pointers(folder) or not (folder / POINTER).is_file():
        return None
    try:
        found = json.loads((folder / POINTER).read_text(encoding="utf-8"))
        address = str(found["result"]) if {"result", "run_id", "digest"} <= set(found) else ""
    # Whoever fills a channel may have a file of this name: whatever is not a pointer of ours is data.
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return address if f"/{RESULT}/" in f"{address}/" else None


def holds_pointers(folder: Path) -> bool:
    """Whether a folder holds pointers and nothing else, at any depth."""
    names = {it.name for it in folder.rglob("*") if not it.is_dir()} if folder.is_dir() else set()
    return names == {POINTER}
