"""Where a run lives: its address for everybody, its record, and the folder that this machine reads it from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sm_llm.errors import StorageError, SubmitError
from sm_llm.owned import GROUP_READABLE, PRIVATE, make_folders
from sm_llm.runs.run_paths import RUN_RECORD, RunPaths
from sm_llm.runs.run_record import RunRecord, exists_already
from sm_llm.storage.uri import open_store, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sm_llm.runs.run_record import Attempt
    from sm_llm.storage.base import Store
    from sm_llm.storage.s3.s3_options import S3Options


class RunHome(Protocol):
    """One run's place. Every method raises ``StorageError`` when the storage does not answer."""

    @property
    def uri(self) -> str:
        """The address of the run's folder, the same on every machine."""

    @property
    def root(self) -> Path:
        """The folder on this machine: the run's own, or for S3 the one it works in, or is copied to, here."""

    @property
    def paths(self) -> RunPaths:
        """The places in ``root``."""

    @property
    def store(self) -> Store:
        """The store at ``uri``: checkpoints and results."""

    @property
    def is_remote(self) -> bool:
        """Whether ``root`` is not where the run is kept, but only where this machine works on it or copies it."""

    @property
    def poll_seconds(self) -> float:
        """How long whoever follows the run waits between two checks."""

    def below(self, *parts: str) -> RunHome:
        """The home of a run inside this one: a workflow's step."""

    def exists(self) -> bool:
        """Whether there is a run record."""

    def record(self) -> RunRecord:
        """The record as it stands now. Raises ``StorageError`` if there is none."""

    def create(self, record: RunRecord) -> None:
        """Write the first record. Raises ``SubmitError`` if there is one already."""

    def update(self, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        """Read, change and write the record so that two writers never lose each other's change."""

    def claim(self, attempt: Attempt) -> None:
        """Make sure that nobody else starts this attempt. Raises ``SubmitError`` if somebody has."""

    def unclaim(self, number: int) -> None:
        """Take a claim back: the attempt could not be started."""

    def refresh(self, prefix: str) -> None:
        """Bring what ``root`` holds below ``events/`` or ``logs/…`` up to date."""


@dataclass(frozen=True)
class FolderHome:
    """A run in a folder that this machine sees: everything is where it is."""

    root: Path
    is_remote: bool = False
    poll_seconds: float = 0.2

    @property
    def uri(self) -> str:
        return str(self.root)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    @property
    def store(self) -> Store:
        return open_store(self.root)

    def below(self, *parts: str) -> FolderHome:
        return FolderHome(self.root.joinpath(*parts))

    def exists(self) -> bool:
        return self.paths.record.is_file()

    def record(self) -> RunRecord:
        return RunRecord.read(self.paths.record)

    def create(self, record: RunRecord) -> None:
        shared = (record.spec.get("storage_options") or {}).get("shared_with_group")
        make_folders(self.root.parent)
        self.root.mkdir(GROUP_READABLE if shared else PRIVATE, exist_ok=True)
        if not self.store.put_if_absent(RUN_RECORD, record.to_text().encode()):
            raise exists_already(self.uri)

    def update(self, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        return RunRecord.update(self.paths.record, change)

    def claim(self, attempt: Attempt) -> None:
        """The caller holds the run's starting lock, which all machines that see the folder share."""
        if self.record().next_attempt != attempt.number:
            raise SubmitError(f"{self.uri}: another launch got in between. Give the same command again")

    def unclaim(self, number: int) -> None:
        """Nothing was written."""

    def refresh(self, prefix: str) -> None:
        """It is the original."""


def home_of(uri: str | Path, options: S3Options | Mapping[str, Any] | None = None) -> RunHome:
    """The home of the run at ``uri``; touches nothing. ``options`` hold how S3 is reached, as for ``open_store``.

    Raises ``StorageError`` for what cannot be the address of a run.
    """
    location = parse(uri)
    if location.path is not None:
        return FolderHome(location.path)
    from sm_llm.runs.s3_home import S3Home
    from sm_llm.storage.s3.s3_options import S3Options

    if not location.prefix:
        raise StorageError(f"{uri}: a run has a folder of its own in a bucket. Write s3://bucket/folder/run-id")
    return S3Home.at(location, options if isinstance(options, S3Options) else S3Options(**(options or {})))


def local_root(uri: str | Path) -> Path:
    """The folder on this machine that belongs to the run at ``uri``."""
    location = parse(uri)
    if location.path is not None:
        return location.path
    from sm_llm.runs.s3_home import workspace

    return workspace(location.uri, os.environ)
