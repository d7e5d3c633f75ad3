"""Finds where runs live: how their storage is reached before anything of them is read, and which lie below a root."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.errors import LaunchRefused, RunNotFound, StorageError
from sm_llm.owned import own_user
from sm_llm.redaction import redact
from sm_llm.runs.run_paths import RUN_RECORD
from sm_llm.runs.run_store import FolderRunStore, run_store_at
from sm_llm.runs.s3_run_store import CONFIG, S3RunStore, workspace
from sm_llm.storage.files import write_atomically
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3.swap import folders
from sm_llm.storage.s3_store import S3Store
from sm_llm.storage.uri import parse
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore

# Requests for run records in flight at a time: each takes a round trip, and little of the processor.
_READERS = 16
_SHOWN = 8
_REACHED = "reached.json"
_FOLDER = "folder"
_LOG = logging.getLogger(__name__)


def user_options(given: S3Options | None = None) -> S3Options:
    """How S3 is reached: as ``given``, else by the user's defaults and variables, else by AWS's own settings."""
    from sm_llm.spec.loading.defaults import read_defaults

    return _over(given or S3Options(), read_defaults(os.environ).values.storage_options.model_dump())


def find_run_store(uri: str | Path) -> RunStore:
    """The store of a run whose record was not read yet.

    Its storage is reached by the user's defaults, or else as a launch on this machine reached it.
    """
    location = parse(uri)
    if location.path is not None:
        return FolderRunStore(location.path)
    return run_store_at(location.uri, _over(user_options(), _remembered(location.uri)))


def with_recorded_options(run_store: RunStore, record: RunRecord) -> RunStore:
    """The same run store, reached by the run's specification; what was given before, and worked, has precedence.

    Never at another host: whoever may write the record would choose where signed requests go.
    """
    if run_store.options is None:
        return run_store
    found = dict(record.spec.get("storage_options") or {})
    # A value of another type than its option's is nobody's setting: a record is data.
    recorded = {name: it for name, it in found.items() if isinstance(it, bool) == (name == "shared_with_group")}
    endpoint = recorded.pop("endpoint_url", None)
    if endpoint and not _is_same_host(endpoint, run_store.endpoint):
        _LOG.warning(
            "%s: its record names the endpoint %r, which is not used. To use it, set SM_LLM_ENDPOINT_URL",
            run_store.uri, redact(str(endpoint)),
        )  # fmt: skip
    options = _over(run_store.options, recorded)
    return run_store if options == run_store.options else run_store_at(run_store.uri, options)


def _is_same_host(first: str, second: str | None) -> bool:
    return str(first).rstrip("/") == str(second).rstrip("/")


def is_own_endpoint(run_store: RunStore, endpoint: str) -> bool:
    """Whether the user chose the endpoint that a run's record names, and not only somebody who may write the record.

    The user did if the user's settings name it, if the run was reached at it, or if the record is the user's own file.
    """
    if endpoint == user_options().endpoint_url:
        return True
    return _is_same_host(endpoint, run_store.endpoint) if run_store.is_remote else _is_own_record(run_store)


def _is_own_record(run_store: RunStore) -> bool:
    return run_store.paths.record.stat().st_uid == os.getuid()


def _owner(path: Path) -> int | None:
    """Whose file it is; None of one that is gone, as a temporary one that another launch has renamed."""
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_uid
    return None


def assert_own_folder(run_store: RunStore) -> None:
    """Raise ``LaunchRefused`` for a run in a folder of somebody else, who could change what an attempt executes.

    An own folder that others may write is closed to them.
    """
    if run_store.is_remote or not run_store.root.is_dir():
        return
    try:
        # Not ``geteuid``: on some network disks the files of this user belong to another number.
        own, mode = own_user(run_store.root), run_store.root.stat().st_mode
        strange = next(
            (it for it in (run_store.root, *run_store.root.iterdir()) if _owner(it) not in (own, None)), None
        )
        # Before anything runs from it: who may write a folder can swap the files in it.
        if strange is None and mode & 0o022:
            run_store.root.chmod(mode & 0o755)
    except OSError as error:
        raise StorageError(f"{run_store.uri}: this run's folder cannot be written: {error}") from error
    if strange is not None:
        raise LaunchRefused(
            f"{strange}: belongs to another user, who could change what an attempt of this run executes. Begin a run "
            f"of your own from it: sm-llm branch {quoted(run_store.uri)} storage=./runs "
            "(or rerun, without a checkpoint)"
        )


def launch_folder(run_store: RunStore, record: RunRecord) -> Path | None:
    """The folder that relative inputs of a run are relative to: where its user stood at the launch.

    None if it is gone, and if only somebody who may write the record names it: then they are relative to the working
    directory, as those of any specification.
    """
    folder = Path(str(record.host.get("folder", "")))
    if not folder.is_absolute() or not folder.is_dir():
        return None
    # Anybody who may write the record in S3 may have named this folder; what this machine noted at the launch is its
    # own.
    is_own = (
        _remembered(run_store.uri).get(_FOLDER) == str(folder) if run_store.is_remote else _is_own_record(run_store)
    )
    if not is_own and folder != Path.cwd():
        _LOG.warning(
            "%s: relative inputs are those of the working directory; its record names %r, where you did not launch it",
            run_store.uri, str(folder),
        )  # fmt: skip
    return folder if is_own else None


def remember_launch(run_store: RunStore, record: RunRecord) -> None:
    """Keep how a run that is launched here is reached, for verbs on this machine that know its address alone, and the
    folder that it was launched from."""
    if run_store.options is not None:
        options = {name: value for name, value in asdict(run_store.options).items() if value is not None}
        write_atomically(run_store.root / _REACHED, json.dumps({**options, _FOLDER: record.host["folder"]}))


def run_stores_below(storage: str | Path, prefix: str = "", options: S3Options | None = None) -> list[RunStore]:
    """The stores of everything right below a storage root that has a name beginning with ``prefix``, run or not."""
    location = parse(storage)
    if location.path is not None:
        paths = location.path.glob(f"{prefix}*/{RUN_RECORD}")
        return [FolderRunStore(path.parent) for path in sorted(paths)]
    assert location.bucket is not None
    store = S3Store(location.bucket, location.prefix, options or user_options(), CONFIG)
    # One listing of names alone: which of them are runs only their records show.
    names = folders(store, prefix)
    below = [store.below(name) for name in names]
    return [S3RunStore(it, workspace(it.uri, os.environ)) for it in below]


def assert_storage(storage: str | Path, options: S3Options | None = None) -> None:
    """Raise ``RunNotFound`` for an address at which there is nothing at all, or which is a run, not where runs are."""
    location = parse(storage)
    uri = location.uri
    if location.path is not None:
        if not location.path.is_dir():
            raise RunNotFound(f"{uri}: there is no such folder, so no run. Check the address")
        is_run = (location.path / RUN_RECORD).is_file()
    else:
        assert location.bucket is not None
        store = S3Store(location.bucket, location.prefix, options or user_options(), CONFIG)
        if not store.holds():
            raise RunNotFound(f"{uri}: there is nothing below this address, so no run. Check it.{_beside(store)}")
        is_run = store.head(RUN_RECORD) is not None
    if is_run:
        raise RunNotFound(f"{uri}: this is a run, not a folder of runs. Show it with: sm-llm status {quoted(uri)}")


def _beside(store: S3Store) -> str:
    above = store.prefix.rstrip("/").rpartition("/")[0]
    found = folders(S3Store(store.bucket, above, store.options, CONFIG))[:_SHOWN]
    return f" Beside it there are: {', '.join(found)}" if found and store.prefix else ""


def read_records(run_stores: list[RunStore]) -> list[tuple[RunStore, RunRecord | StorageError | None]]:
    """Every run store with its record, the error that reading it met, or None where there is none. A few at a time."""

    def read(run_store: RunStore) -> RunRecord | StorageError | None:
        try:
            return run_store.record()
        except StorageError as error:
            # Whether it is there is asked only now: most of what lies below a root of runs is a run.
            with contextlib.suppress(StorageError):
                return error if run_store.exists() else None
            raise

    with ThreadPoolExecutor(_READERS) as pool:
        return list(zip(run_stores, pool.map(read, run_stores), strict=True))


def _over(first: S3Options, second: Mapping[str, Any]) -> S3Options:
    """``first``, with what it leaves open taken from ``second``."""
    open_fields = {name: second.get(name) for name, value in asdict(first).items() if value is None}
    return replace(first, **open_fields)


def _remembered(uri: str) -> Mapping[str, Any]:
    """The options of a launch on this machine; nothing of the copy of the record, which others may have written."""
    try:
        options = json.loads((workspace(uri, os.environ) / _REACHED).read_text(encoding="utf-8"))
        return options if isinstance(options, dict) else {}
    except (OSError, ValueError):
        return {}
