"""Copies a model or data set of the hub to a folder or a store: one commit, one weight format, every file proved."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sm_llm.errors import StorageError
from sm_llm.storage.base import Copy, StoredObject
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.engines.common import each
from sm_llm.storage.hub.hub_addresses import CONTROL_FOLDER, HubFile, HubSnapshot, parse_hub
from sm_llm.storage.hub.hub_download import download, has_content
from sm_llm.storage.hub.hub_ledger import Ledger
from sm_llm.storage.publication.manifest import FileEntry
from sm_llm.storage.syncing.selection import LeftOut, Selection
from sm_llm.storage.syncing.sync_settings import SyncProgress
from sm_llm.storage.transfer import default_transfer
from sm_llm.storage.uri import open_store, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sm_llm.storage.base import Progress, Store
    from sm_llm.storage.s3.s3_options import S3Options

LEDGER = f"{CONTROL_FOLDER}/"
"""In a destination of its own: the pin, and files in the making."""
EXCLUDE = ("original",)
"""Left out by default: the maker's own checkpoints beside the converted ones."""
WORKERS = 4
"""Files at a time. A store's scratch disk holds as many whole ones."""
_SPARE_BYTES = 16 << 20


@dataclass
class FetchReport:
    """What a fetch found and did; sizes in bytes."""

    source: str
    commit: str
    destination: str
    copied: list[str] = field(default_factory=list)
    copied_size: int = 0
    unchanged: int = 0
    unchanged_size: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class FetchTarget(Protocol):
    """Where fetched files go."""

    def has(self, file: HubFile) -> bool:
        """Whether the file is there already, whole and right."""

    def require_space(self, files: Sequence[HubFile]) -> None:
        """Raise ``StorageError`` if these files will not fit."""

    def bring(self, snapshot: HubSnapshot, file: HubFile, progress: Progress) -> None:
        """Fetch the file and put it there."""


def fetch(
    source: str,
    destination: str | Path,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = EXCLUDE,
    one_weight_format: bool = True,
    options: S3Options | Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FetchReport:
    """Copy ``hf://[datasets/]org/name[@revision][/path]`` to a folder or to ``s3://bucket/prefix``.

    The first call pins the commit that the revision names then, in the destination's ``.fetch/source.json`` with the
    checksum of every file; later calls continue with that commit. Files that are there and right stay; in a folder a
    file that broke off is continued there. Every file is compared with the hub's own checksum (SHA-256, or the git
    blob's SHA-1), read back from disk; to S3 one file after the other goes by way of a temporary folder.

    Args:
        source: address on the hub; without a revision the main branch as it is now.
        destination: folder or ``s3://bucket/prefix``; of one address only.
        include: patterns of what to take: ``tokenizer``, ``.json``, ``*.safetensors`` (see ``Selection``).
        exclude: patterns of what to leave out; they win.
        one_weight_format: leave other formats out where the weights are there as safetensors.
        options: how S3 is reached.
        progress: called with bytes done and bytes in all.

    Raises ``StorageError``: refused (naming the licence page and the token's permission), offline, no such
    repository, revision or file, too little disk, and a file that arrives wrong three times.
    """
    began = time.monotonic()
    address, there = parse_hub(source), parse(destination)
    if there.path is not None:
        there.path.mkdir(parents=True, exist_ok=True)
    store = open_store(there.uri, options)
    ledger = Ledger(store, LEDGER)
    # Before anything is fetched: all files of a destination are of one commit.
    snapshot = ledger.pin(address)
    files, left_out = select(snapshot, Selection(include, exclude, one_weight_format))
    report = FetchReport(address.uri, snapshot.commit, there.uri, left_out=left_out)
    sink = FolderTarget(there.path) if there.path is not None else StoreTarget(store, "", ledger)
    bring_files(snapshot, files, sink, progress, report)
    report.seconds = time.monotonic() - began
    return report


def select(snapshot: HubSnapshot, selection: Selection) -> tuple[list[HubFile], list[LeftOut]]:
    """The files of the address' path that are meant; paths of a folder stay those in the repository.

    Raises ``StorageError`` if there are none.
    """
    path = snapshot.address.path
    inside = [it for it in snapshot.files if not path or it.path == path or it.path.startswith(f"{path}/")]
    if not inside:
        what = f"no file or folder {path!r}" if path else "no file"
        raise StorageError(f"{snapshot.address.uri}: commit {snapshot.commit} holds {what}")
    kept, left_out = selection.apply([StoredObject(it.path, it.size) for it in inside])
    # A selection sees names and sizes alone; the entries of the hub have the checksums to compare with.
    names = {it.key for it in kept}
    return [it for it in inside if it.path in names], left_out


def bring_files(
    snapshot: HubSnapshot,
    files: Sequence[HubFile],
    sink: FetchTarget,
    progress: Callable[[int, int], None],
    report: FetchReport | None = None,
) -> None:
    """Bring what ``sink`` lacks, several files at a time; the first error is raised."""
    there = each(WORKERS, sink.has, files)
    missing = [file for file, is_there in zip(files, there, strict=True) if not is_there]
    # Before the first byte: weights of hundreds of GB take hours until a full disk ends them.
    sink.require_space(missing)
    meter = SyncProgress(sum(it.size for it in missing), progress)
    each(WORKERS, lambda file: sink.bring(snapshot, file, meter), missing)
    if report is not None:
        report.copied, report.copied_size = [it.path for it in missing], sum(it.size for it in missing)
        report.unchanged = len(files) - len(missing)
        report.unchanged_size = sum(it.size for it in files) - report.copied_size


@dataclass(frozen=True)
class FolderTarget:
    """Files at their paths below a folder."""

    folder: Path

    def has(self, file: HubFile) -> bool:
        return has_content(self.folder / file.path, file)

    def require_space(self, files: Sequence[HubFile]) -> None:
        parts = [self._part(file) for file in files]
        # What earlier calls have left is continued, so only the rest needs space.
        held = sum(part.stat().st_size for part in parts if part.is_file())
        require_space(self.folder, sum(file.size for file in files) - held)

    def bring(self, snapshot: HubSnapshot, file: HubFile, progress: Progress) -> None:
        download(snapshot, file, self.folder / file.path, self._part(file), progress)

    def _part(self, file: HubFile) -> Path:
        """The name depends on the content: what broke off is never continued as something else."""
        name = hashlib.sha256(f"{file.path}\0{file.checksum}".encode()).hexdigest()[:32]
        return self.folder / LEDGER / f"{name}.part"


@dataclass(frozen=True)
class StoreTarget:
    """Objects below a prefix of a store, by way of a scratch folder; a ledger remembers what is stored."""

    store: Store
    prefix: str
    ledger: Ledger
    scratch: Path | None = None

    def has(self, file: HubFile) -> bool:
        entry = self.ledger.noted(file)
        found = None if entry is None else self.store.head(self.prefix + file.path)
        # A note alone proves nothing: whoever owns the bucket may have deleted or replaced the object.
        if entry is None or found is None or found.size != entry.size:
            return False
        return (found.crc64nvme or self.store.checksum(found.key)) == entry.crc64nvme

    def require_space(self, files: Sequence[HubFile]) -> None:
        # Each worker has one file there at a time, so the largest ones together are the most that can lie there.
        largest = sorted((file.size for file in files), reverse=True)[:WORKERS]
        require_space(self.scratch or Path(tempfile.gettempdir()), sum(largest))

    def bring(self, snapshot: HubSnapshot, file: HubFile, progress: Progress) -> None:
        key = self.prefix + file.path
        with _temporary_folder(self.scratch) as folder:
            local = folder / "file"
            download(snapshot, file, local, folder / "part", progress)
            copy = Copy(key, local, file.size, crc64_file(local))
            if self.store.head(key) is not None:  # stored, but not noted, by an attempt that was killed in between
                self.store.delete([key])
            (stored,) = default_transfer(self.store).upload(self.store, [copy], lambda _: None)
        if (stored.size, stored.crc64nvme) != (copy.size, copy.crc64nvme):
            raise StorageError(
                f"{self.store.uri}: {key!r} was stored as {stored.size} bytes with checksum {stored.crc64nvme}, "
                f"but the original has {copy.size} bytes and {copy.crc64nvme}"
            )
        self.ledger.note(file, FileEntry(path=file.path, size=file.size, crc64nvme=copy.crc64nvme))

    def entries(self, files: Sequence[HubFile]) -> tuple[FileEntry, ...]:
        """What was noted of files that are all there."""
        noted = each(WORKERS, self.ledger.noted, files)
        return tuple(entry for entry in noted if entry is not None)


@contextmanager
def _temporary_folder(scratch: Path | None) -> Iterator[Path]:
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fetch-", dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_space(folder: Path, needed: int) -> None:
    """Raise ``StorageError`` if the disk of ``folder`` has not ``needed`` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > 0 and needed + min(_SPARE_BYTES, needed) > free:
        raise StorageError(
            f"{folder}: disk full: {needed:,} bytes are to be fetched, but only {free:,} are free. Nothing was "
            "fetched. Name another disk, or take less with include"
        )
