"""The files of a local folder as they would be stored: links followed, anything that cannot be stored refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.base import StoredObject

if TYPE_CHECKING:
    from collections.abc import Iterator


def scan(folder: Path) -> list[StoredObject]:
    """Every file below ``folder`` by its path with "/"; a link counts as what it points at, wherever that lies.

    ``tag`` changes whenever the file may have. Raises ``StorageError`` for a broken link, a loop of links, a name
    that is not UTF-8, and for pipes, sockets and devices: nothing is left out in silence.
    """
    return sorted(_walk(folder, "", ()), key=lambda it: it.key)


def describe(key: str, path: Path) -> StoredObject | None:
    """One local file under ``key``, or None if there is none. Raises ``StorageError`` for what is not a plain file."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path}: is not a plain file")
    # Any of them changes when a file is written or replaced: a modification time can be set back, a change time cannot.
    identity = f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"
    return StoredObject(key, status.st_size, None, status.st_mtime, identity)


def _walk(folder: Path, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[StoredObject]:
    try:
        status = folder.stat()
        entries = sorted(os.scandir(folder), key=lambda it: it.name)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}") from error
    here = (status.st_dev, status.st_ino)
    # Compared with the folders above alone: two links to one folder side by side are no loop.
    if here in above:
        raise StorageError(f"{folder}: is a link back to a folder above it")
    for entry in entries:
        key, path = f"{prefix}{entry.name}", Path(entry.path)
        _require_text(key)
        # Follows links, as is_file and stat do.
        if entry.is_dir():
            yield from _walk(path, f"{key}/", (*above, here))
        elif (found := describe(key, path)) is not None:
            yield found
        else:
            raise StorageError(f"{path}: is a link to nothing ({os.readlink(path)})")


def _require_text(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise StorageError(f"{name!r}: is not UTF-8, and S3 keeps only names that are. Rename it") from None
