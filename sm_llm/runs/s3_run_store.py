"""A run in S3: its record is changed by conditional writes, its growing files are mirrored to a folder here."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError, SubmitError
from sm_llm.owned import cache_folder, make_folders, private_folder
from sm_llm.runs.run_paths import RUN_RECORD, RunPaths
from sm_llm.runs.run_record import RunRecord, exists_already
from sm_llm.storage.files import write_atomically
from sm_llm.storage.s3.swap import Tagged, change, read_tagged, swap
from sm_llm.storage.s3_store import S3Store
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from sm_llm.runs.heartbeat import Heartbeat
    from sm_llm.runs.replication.log_uploader import LogUploader
    from sm_llm.runs.replication.s3_cache import S3Cache
    from sm_llm.runs.run_record import Attempt
    from sm_llm.storage.s3.s3_options import S3Options
    from sm_llm.storage.uri import Location

CONFIG: dict[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 10,
    "retries": {"mode": "standard", "total_max_attempts": 4},
}
"""Small objects, and people who wait: a store that does not answer is reported within three quarters of a minute."""


def workspace(uri: str, environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/sm_llm/runs/<run-id>-<8 hex digits of the URI's SHA-256>``."""
    digest = hashlib.sha256(uri.encode()).hexdigest()[:8]
    return cache_folder(environ) / "runs" / f"{uri.rpartition('/')[2]}-{digest}"


@dataclass(frozen=True)
class S3RunStore:
    """``store`` is the truth. ``root`` is where attempts that run on this machine work, and a mirror of all others.

    What starts, stops and follows attempts is imported where it is used: a plan needs none of it.
    """

    store: S3Store
    root: Path
    is_remote: bool = True
    poll_seconds: float = 1.0  # a look asks the store

    @classmethod
    def at(cls, location: Location, options: S3Options) -> S3RunStore:
        """The run store at an address in S3; touches nothing."""
        assert location.bucket is not None
        store = S3Store(location.bucket, location.prefix, options, CONFIG)
        return cls(store, workspace(location.uri, os.environ))

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root)

    @property
    def options(self) -> S3Options:
        return self.store.options

    @property
    def endpoint(self) -> str:
        # The client's: what AWS's own settings name counts, too.
        return str(self.store.client.meta.endpoint_url)

    def below(self, *parts: str) -> S3RunStore:
        store = self.store.below("/".join(parts))
        return S3RunStore(store, workspace(store.uri, os.environ))

    def exists(self) -> bool:
        return self.store.head(RUN_RECORD) is not None

    def record(self) -> RunRecord:
        found = read_tagged(self.store, RUN_RECORD)
        record = self._parse(found)
        self._remember(found.body)
        return record

    def create(self, record: RunRecord) -> None:
        body = record.to_text().encode()
        # Created only if absent: of two launches that chose one id, the second must not replace the record.
        if swap(self.store, RUN_RECORD, body, None) is None:
            raise exists_already(self.uri)
        self._remember(body)

    def update(self, change_record: Callable[[RunRecord], RunRecord]) -> RunRecord:
        body = change(self.store, RUN_RECORD, lambda found: change_record(self._parse(found)).to_text().encode())
        self._remember(body)
        return RunRecord.parse(body, self._name)

    def claim(self, attempt: Attempt) -> None:
        """The attempt is in the record from here on: whoever changes the record first has it."""

        # Compared inside the conditional write: two launches that have read one record cannot both add to it.
        def begun(record: RunRecord) -> RunRecord:
            if record.next_attempt != attempt.number:
                raise SubmitError(_lost(self.uri, record, attempt.number))
            return record.with_attempt(attempt)

        self.update(begun)

    def unclaim(self, number: int) -> None:
        # The next launch may be another machine's: then nothing here is an original of the attempt of this number.
        shutil.rmtree(self.paths.attempt_dir(number), ignore_errors=True)
        self.update(lambda record: record.without_attempt(number))

    def hold_originals(self, attempt: int) -> None:
        make_folders(self.paths.attempt_dir(attempt))

    def has_originals(self, attempt: int) -> bool:
        """Whether this machine works, or worked, on an attempt: it then has a folder of it."""
        return self.paths.attempt_dir(attempt).is_dir()

    def refresh(self, prefix: str) -> None:
        if not self.is_original(prefix):
            self._cache.refresh(prefix, lambda name: not self.is_original(name))

    def is_original(self, name: str) -> bool:
        attempt = RunPaths.attempt_of(name)
        return attempt is not None and self.has_originals(attempt)

    def copied(self, prefix: str, wanted: Callable[[str], bool], root: Path) -> RunPaths:
        from sm_llm.runs.replication.s3_cache import S3Cache

        S3Cache(root, self.store).refresh(prefix, wanted)
        return RunPaths(root)

    def keep(self, path: Path) -> None:
        body = path.read_bytes()
        change(self.store, path.relative_to(self.root).as_posix(), lambda _: body)

    def uploader(self, root: Path, chosen: Callable[[str], bool]) -> LogUploader:
        from sm_llm.runs.replication.log_uploader import LogUploader

        return LogUploader(root, self.store, chosen)

    def request_stop(self, attempt: int) -> None:
        from sm_llm.runs.stop_request import ask_to_stop

        ask_to_stop(self.store, attempt)

    def is_asked_to_stop(self, attempt: int) -> bool:
        from sm_llm.runs.stop_request import is_asked_to_stop

        return is_asked_to_stop(self.store, attempt)

    def beat(self, attempt: int) -> None:
        from sm_llm.runs.heartbeat import Heartbeat

        Heartbeat(self.store, attempt).beat()

    def heartbeat(self, attempt: int, on_superseded: Callable[[], None]) -> Heartbeat:
        """Over a connection of its own, so that a slow upload is no sign of death."""
        from sm_llm.runs.heartbeat import Heartbeat, impatient

        return Heartbeat(impatient(self.store), attempt, on_superseded)

    def silence(self) -> float | None:
        from sm_llm.runs.heartbeat import silence

        return silence(self.store)

    @cached_property
    def _cache(self) -> S3Cache:
        from sm_llm.runs.replication.s3_cache import S3Cache

        return S3Cache(self.root, self.store)

    @property
    def _name(self) -> str:
        return f"{self.uri}/{RUN_RECORD}"

    def _parse(self, found: Tagged) -> RunRecord:
        if found.tag is None:
            raise StorageError(f"{self._name}: there is no run record here. Is this a run's address?")
        return RunRecord.parse(found.body, self._name)

    def _remember(self, body: bytes) -> None:
        """Keep a copy: the next command reads from it how the store is reached, and nothing else."""
        try:
            private_folder(self.root.parent.parent)
            # Whoever follows a run reads its record every second, and most of the time nothing has changed.
            if not self.paths.record.is_file() or self.paths.record.read_bytes() != body:
                write_atomically(self.paths.record, body)
        except OSError as error:
            raise StorageError(f"{self.root}: this machine's folder for the run cannot be written: {error}") from error


def _lost(uri: str, record: RunRecord, number: int) -> str:
    winner = record.attempt(number)
    where = f" on {winner.host}" if winner is not None and winner.host else ""
    return (
        f"{record.run_id}: another launch was first, and has started attempt {number}{where}. "
        f"Follow it with: sm-llm logs -f {quoted(uri)}"
    )
