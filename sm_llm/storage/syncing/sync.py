"""Copies a folder to S3, S3 to a folder, or a folder to a folder: what is there and equal stays, the rest is proved."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageRefused
from sm_llm.storage.engines.auto import ENGINES
from sm_llm.storage.publication.result import result_address
from sm_llm.storage.syncing.scan import describe, scan
from sm_llm.storage.syncing.selection import Selection
from sm_llm.storage.syncing.sync_down import fetch_files
from sm_llm.storage.syncing.sync_settings import SyncReport, SyncSettings
from sm_llm.storage.syncing.sync_up import store_files
from sm_llm.storage.transfer import CopyTransfer
from sm_llm.storage.uri import Location, open_store, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from sm_llm.storage.base import Store, StoredObject, Transfer
    from sm_llm.storage.s3.s3_options import S3Options

_WILDCARDS = "*?["


def sync(
    source: str | Path,
    destination: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    one_weight_format: bool = True,
    engine: str = "auto",
    max_bandwidth: int | None = None,
    resume: bool = True,
    dry_run: bool = False,
    options: S3Options | Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SyncReport:
    """Copy a folder, a file or everything below an S3 prefix; one side is a folder. Nothing is ever deleted.

    A file that is there already stays if it is equal, by content: neither sizes nor times are believed. Every file
    that is copied is verified: downloads by CRC64NVME of the bytes read back from disk before they get their name,
    uploads by the checksum S3 computed of what it stored, and by a listing.

    Args:
        source: folder, file, ``s3://bucket/prefix`` or one object; wildcards belong into ``include``. ``RUN/result``
            stands for what a run has published.
        destination: folder or ``s3://bucket/prefix``, always taken as a folder (closed by "/").
        include: patterns of what to take: ``original``, ``.pth``, ``*.json`` (see ``Selection``).
        exclude: patterns of what to leave out; they win.
        one_weight_format: of a model folder with safetensors leave other formats of its weights out.
        engine: ``auto``, ``s5cmd``, ``crt`` or ``boto3``; the report names which one moved what.
        max_bandwidth: bytes per second.
        resume: a file above 1 GiB that is broken off is continued inside the file next time.
        dry_run: compare only.
        options: how S3 is reached.
        progress: called with bytes done and bytes in all.

    Raises ``StorageError``: an empty or mistyped source, names that cannot exist on the other side, too little free
    disk, a file that stays wrong after three tries, and a storage that does not answer.
    """
    began = time.monotonic()
    source = result_address(str(source), options)
    here, there = _locate(source, "source"), _locate(destination, "destination")
    if here.path is None and there.path is None:
        raise StorageRefused("sync: one of source and destination must be a folder on this machine")
    report = SyncReport(here.uri, there.uri)
    transfer = _transfer(here, there, engine, max_bandwidth, resume, report.engines.append)
    settings = SyncSettings(Selection(include, exclude, one_weight_format), transfer, dry_run, progress, report)
    if there.path is None:
        items, folder = _local_items(here)
        _assert_folder_meant(here.path is not None and here.path.is_file(), items, destination)
        store_files(open_store(there.uri, options), folder, items, settings)
    else:
        store, items = _items(here, options)
        # A folder that exists is meant as one, whatever it is called.
        if not there.path.is_dir():
            _assert_folder_meant(store.uri != here.uri, items, destination)
        fetch_files(store, items, there.path, settings)
    report.seconds = time.monotonic() - began
    return report


def _transfer(
    here: Location,
    there: Location,
    engine: str,
    max_bandwidth: int | None,
    resume: bool,
    announce: Callable[[str], None],
) -> Transfer:
    if engine not in ENGINES:
        raise StorageRefused(f"engine: there is no {engine!r}. Known: {', '.join(ENGINES)}")
    if max_bandwidth is not None and max_bandwidth < 1:
        raise StorageRefused(f"max_bandwidth: must be at least 1 byte per second (got {max_bandwidth})")
    # Engines move bytes between a disk and S3; between two folders there is nothing to choose.
    if here.path is not None and there.path is not None:
        return CopyTransfer()
    from sm_llm.storage.engines.auto import EngineTransfer

    return EngineTransfer(engine, max_bandwidth=max_bandwidth, resume=resume, announce=announce)


def _locate(address: str | Path, what: str) -> Location:
    location = parse(address)
    # A file may have such characters in its name: only what does not exist is taken for a pattern.
    exists = location.path is not None and location.path.exists()
    if any(character in str(address) for character in _WILDCARDS) and not exists:
        pattern = str(address).rpartition("/")[2]
        raise StorageRefused(
            f"{what}: {str(address)!r} holds a wildcard. Name the folder and give --include {pattern!r}"
        )
    if what == "destination" and location.path is not None and exists and not location.path.is_dir():
        raise StorageRefused(f"destination: {location.path} is a file. Name a folder")
    return location


def _assert_folder_meant(is_file: bool, items: Sequence[StoredObject], destination: str | Path) -> None:
    """One file to a place of the same name was most likely not meant to become a file in a folder of its own name."""
    above, slash, name = str(destination).rpartition("/")
    if is_file and name == items[0].key:
        raise StorageRefused(
            f"destination: {str(destination)!r} is taken for a folder, and {name!r} would be put into it. "
            f"Name the folder, {above if slash else '.'!r}, or close this one with '/'"
        )


def _local_items(here: Location) -> tuple[list[StoredObject], Path]:
    """The files of a local source and the folder their keys are relative to."""
    path = here.path
    assert path is not None
    if path.is_dir():
        items, folder = scan(path), path
    else:
        single = describe(path.name, path)
        items, folder = [single] if single is not None else [], path.parent
    if not items:
        problem = "holds no file" if path.is_dir() else "does not exist"
        raise StorageRefused(f"source: {path} {problem}, so there is nothing to copy")
    return items, folder


def _items(here: Location, options: S3Options | Mapping[str, Any] | None) -> tuple[Store, list[StoredObject]]:
    """The files of a source and the store their keys are of."""
    if here.path is not None:
        items, folder = _local_items(here)
        return open_store(folder), items
    store = open_store(here.uri, options)
    if items := store.list(""):
        return store, items
    parent, _, name = here.prefix.rpartition("/")
    above = open_store(f"s3://{here.bucket}/{parent}", options)
    single = above.head(name) if name else None
    if single is None:
        raise StorageRefused(
            f"source: {here.uri} holds nothing: no object below it, and none of that name.{_near(above, name)}"
        )
    return above, [replace(single, key=name)]


def _near(above: Store, name: str) -> str:
    """Keys that begin like a mistyped one: a prefix is a folder here, never the beginning of a name."""
    found = [it.key for it in above.list(name)[:3]]
    return f" There are, for example: {', '.join(map(repr, found))}" if found else ""
