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

    from sm_llm.runs.heartbeat import Heartbeat
    from sm_llm.runs.replication.log_uploader import LogUploader
    from sm_llm.runs.run_record import Attempt
    from sm_llm.storage.base import Store
    from sm_llm.storage.s3.s3_options import S3Options


# Nobody else may ask a run to stop, or read what it holds.
_PRIVATE_FILE = 0o600


class RunStore(Protocol):
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

    @property
    def options(self) -> S3Options | None:
        """How its storage is reached; None for a folder."""

    @property
    def endpoint(self) -> str | None:
        """The host that signed requests go to; None for a folder, which needs none."""

    def below(self, *parts: str) -> RunStore:
        """The store of a run inside this one: a workflow's step."""

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
        """Release a claim: the attempt could not be started."""

    def hold_originals(self, attempt: int) -> None:
        """From now on the files of a claimed attempt in ``root`` are those that it writes: it runs on this machine."""

    def has_originals(self, attempt: int) -> bool:
        """Whether the files of an attempt in ``root`` are those that it writes, and no copies of them."""

    def is_original(self, name: str) -> bool:
        """The same for one file, or all with that beginning, by its path below ``root``."""

    def refresh(self, prefix: str) -> None:
        """Bring what ``root`` holds below ``events/`` or ``logs/…`` up to date."""

    def copied(self, prefix: str, wanted: Callable[[str], bool], root: Path) -> RunPaths:
        """Where the files below ``prefix`` can be read: in the run's folder or, once fetched, in ``root``.

        ``wanted`` chooses what is fetched, by its path below the run's folder.
        """

    def keep(self, path: Path) -> None:
        """Store a file of ``root`` where the run is kept, in place of what is there."""

    def uploader(self, root: Path, chosen: Callable[[str], bool]) -> LogUploader | None:
        """What uploads the growing files below ``root`` that are ``chosen``; None where they are kept there."""

    def request_stop(self, attempt: int) -> None:
        """Ask an attempt, wherever it runs, to stop after its current step."""

    def is_asked_to_stop(self, attempt: int) -> bool:
        """Whether somebody has asked this attempt."""

    def beat(self, attempt: int) -> None:
        """Show other machines once that an attempt of this machine is running. A folder's lock shows it anyway."""

    def heartbeat(self, attempt: int, on_superseded: Callable[[], None]) -> Heartbeat | None:
        """What shows it for as long as the attempt lasts; None for a folder.

        ``on_superseded`` is called when a later attempt turns out to have begun elsewhere.
        """

    def silence(self) -> float | None:
        """Seconds since the last heartbeat; None if there never was one, and for a folder."""


@dataclass(frozen=True)
class FolderRunStore:
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

    @property
    def options(self) -> None:
        return None

    @property
    def endpoint(self) -> None:
        return None

    def below(self, *parts: str) -> FolderRunStore:
        return FolderRunStore(self.root.joinpath(*parts))

    def exists(self) -> bool:
        return self.paths.record.is_file()

    def record(self) -> RunRecord:
        return RunRecord.read(self.paths.record)

    def create(self, record: RunRecord) -> None:
        shared = (record.spec.get("storage_options") or {}).get("shared_with_group")
        try:
            make_folders(self.root.parent)
            # The folder's own mode decides for all that is made in it (``owned.make_folders``, ``owned.opener``).
            self.root.mkdir(GROUP_READABLE if shared else PRIVATE, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.root}: the run's folder cannot be made: {error.strerror}") from error
        # Exclusive also between machines that share the folder, as the store's files are.
        if not self.store.put_if_absent(RUN_RECORD, record.to_text().encode()):
            raise exists_already(self.uri)

    def update(self, change: Callable[[RunRecord], RunRecord]) -> RunRecord:
        return RunRecord.update(self.paths.record, change)

    def claim(self, attempt: Attempt) -> None:
        """The caller holds the run's starting lock, which all machines that see the folder share."""
        # The record was read before the lock was taken: another launch may have come and gone meanwhile.
        if self.record().next_attempt != attempt.number:
            raise SubmitError(f"{self.uri}: another launch got in between. Give the same command again")

    def unclaim(self, number: int) -> None:
        """Nothing was written."""

    def hold_originals(self, attempt: int) -> None:
        """They are, whichever machine runs it."""

    def has_originals(self, attempt: int) -> bool:
        return True

    def is_original(self, name: str) -> bool:
        return True

    def refresh(self, prefix: str) -> None:
        """It is the original."""

    def copied(self, prefix: str, wanted: Callable[[str], bool], root: Path) -> RunPaths:
        return self.paths

    def keep(self, path: Path) -> None:
        """It is kept where it was written."""

    def uploader(self, root: Path, chosen: Callable[[str], bool]) -> None:
        return None

    def request_stop(self, attempt: int) -> None:
        """The next attempt removes the file as it begins, so it can ask only the one that runs."""
        try:
            self.paths.stop_file.touch(_PRIVATE_FILE)
        except OSError as error:
            raise StorageError(f"{self.uri}: the request to stop cannot be written: {error}") from error

    def is_asked_to_stop(self, attempt: int) -> bool:
        return self.paths.stop_file.exists()

    def beat(self, attempt: int) -> None:
        """Its lock shows that it is alive."""

    def heartbeat(self, attempt: int, on_superseded: Callable[[], None]) -> None:
        return None

    def silence(self) -> None:
        return None


def run_store_at(uri: str | Path, options: S3Options | Mapping[str, Any] | None = None) -> RunStore:
    """The store of the run at ``uri``; touches nothing. ``options`` hold how S3 is reached, as for ``open_store``.

    Raises ``StorageError`` for what cannot be the address of a run.
    """
    location = parse(uri)
    if location.path is not None:
        return FolderRunStore(location.path)
    # Imported here: a run in a folder needs nothing of S3.
    from sm_llm.runs.s3_run_store import S3RunStore
    from sm_llm.storage.s3.s3_options import S3Options

    # At the root of a bucket the files of several runs would mix.
    if not location.prefix:
        raise StorageError(f"{uri}: a run has a folder of its own in a bucket. Write s3://bucket/folder/run-id")
    return S3RunStore.at(location, S3Options.of(options))


def local_root(uri: str | Path) -> Path:
    """The folder on this machine that belongs to the run at ``uri``."""
    location = parse(uri)
    if location.path is not None:
        return location.path
    from sm_llm.runs.s3_run_store import workspace

    return workspace(location.uri, os.environ)
