"""Brings one file of the hub to disk: resumes inside it, and verifies its bytes before it gets its name."""

from __future__ import annotations

import hashlib
import io
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.files import drop_cache, fsync_path
from sm_llm.storage.hub.hub_addresses import endpoint, hub_errors, library, patiently

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from sm_llm.storage.base import Progress
    from sm_llm.storage.hub.hub_addresses import HubFile, HubSnapshot

_TRIES = 3
_BLOCK_BYTES = 1 << 20


def download(snapshot: HubSnapshot, file: HubFile, target: Path, part: Path, progress: Progress) -> None:
    """Fetch ``file`` to ``target`` by way of ``part``, a place on the same disk that is kept when it breaks off.

    Bytes that ``part`` holds from before count as progress. Raises ``StorageError``, also for a file that arrives
    with other content than the hub lists, three times.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    length = _Length(progress)
    with hub_errors(snapshot.address):
        for _ in range(_TRIES):
            patiently(lambda: _continue(snapshot, file, part, length))
            fsync_path(part)  # pages that are still dirty cannot be dropped, and would be compared from memory
            if has_content(part, file):
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)
                fsync_path(target.parent)
                return
            part.unlink()
            length.becomes(0)
        raise StorageError(f"{file.path!r} arrives with other content than the hub lists, {_TRIES} times")


def _continue(snapshot: HubSnapshot, file: HubFile, part: Path, length: _Length) -> None:
    """Fetch what ``part`` lacks, by plain HTTP: the library's faster protocol cannot continue inside a file."""
    hub, address = library(snapshot.address), snapshot.address
    url = hub.hf_hub_url(
        address.repository, file.path, repo_type=address.kind, revision=snapshot.commit, endpoint=endpoint()
    )
    # Longer than the whole file, so it is not a beginning of it.
    if part.is_file() and part.stat().st_size > file.size:
        part.unlink()
    with _Part(part, length, file) as stream:
        held = stream.tell()
        if held < file.size or not held:
            # ``identity``: positions in a compressed answer are not positions in the file.
            headers = {**hub.utils.build_hf_headers(), "Accept-Encoding": "identity"}
            hub.file_download.http_get(url, stream, resume_size=held, headers=headers)


class _Length:
    """Reports how much longer, or shorter, a file has become."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reported = 0

    def becomes(self, size: int) -> None:
        self._progress(size - self._reported)
        self._reported = size


class _Part(io.BufferedWriter):
    """A file that is appended to, up to the size that the hub lists."""

    def __init__(self, path: Path, length: _Length, file: HubFile) -> None:
        # Appending, so that what broke off is continued at its end.
        super().__init__(io.FileIO(path, "ab"))
        self._length, self._file = length, file
        length.becomes(self.tell())

    def write(self, data: Any) -> int:
        # Checked before it is written: a hub that sends without end must not fill the disk.
        if self.tell() + len(data) > self._file.size:
            raise StorageError(f"{self._file.path!r} has {self._file.size:,} bytes, and more of them arrive")
        count = super().write(data)
        self._length.becomes(self.tell())
        return count

    def truncate(self, size: int | None = None) -> int:
        left = super().truncate(size)
        self._length.becomes(left)
        return left


def has_content(path: Path, file: HubFile) -> bool:
    """Whether the bytes on disk are those of ``file``. Raises ``OSError`` if they cannot be read."""
    return path.is_file() and path.stat().st_size == file.size and _checksum(path, file) == file.checksum


def _checksum(path: Path, file: HubFile) -> str:
    kind = file.checksum.partition(":")[0]
    # The id of a git blob is the SHA-1 of a header with its length, and of its content.
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb", buffering=0) as stream:
        drop_cache(stream.fileno())
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"
