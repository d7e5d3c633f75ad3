"""A Store in a folder: what is created is on disk before the call returns, and nothing appears half-written."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sm_llm.errors import StorageError
from sm_llm.owned import make_folders, opener
from sm_llm.storage.base import SMALL_BYTES, MissingObjectError, StoredObject, TooLargeError
from sm_llm.storage.checksum import CHUNK_BYTES, Crc64, crc64_file
from sm_llm.storage.files import fsync_path, read_regular, temporary_name, write_new
from sm_llm.storage.stored_names import path_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Folder below the root for objects in the making; a killed writer leaves a few kilobytes there, never read.
_TEMPORARY = ".tmp"

_PRUNED_TRIES = 5
_Result = TypeVar("_Result")


class FolderStore:
    """Objects as files below ``root``.

    Reading from a root that does not exist is a ``StorageError``, not "nothing there": a share that is not mounted
    must never look like a run without checkpoints. Writing makes the folders it needs.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write aside, flush, and hard-link to the final name, which fails if the name is taken."""
        target = self._path(key)
        with self._reported("create", key):
            # Below the root, because a hard link cannot cross file systems.
            temporary = self.root / _TEMPORARY / temporary_name(target).name
            make_folders(temporary.parent)
            try:
                write_new(temporary, body)
                return self._link(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)

    def _link(self, source: Path, target: Path) -> bool:
        try:
            _in_its_folder(target, lambda: os.link(source, target))
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StorageError(
                    f"{self.uri}: this file system has no hard links, which publication needs to create a file "
                    "exactly once. Put the runs on a local disk, NFS or Lustre"
                ) from error
            raise
        fsync_path(target.parent)
        return True

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        with self._reported("read", key):
            self._require_root()
            try:
                return read_regular(path, SMALL_BYTES)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:
                    return None
                if error.errno != errno.EFBIG:
                    raise
                raise TooLargeError(f"{self.uri}: {key!r}: {error.strerror}") from error

    def put_file(self, source: Path, key: str) -> StoredObject:
        """Copy, flush, then read back from the device. Raises ``StorageError`` if the key exists or bytes differ."""
        target = self._path(key)
        with self._reported("write", key):
            sent = _in_its_folder(target, lambda: _copy(source, target))
            fsync_path(target.parent)
            # From the device: the page cache would return what was sent, whatever has reached the disk.
            stored = StoredObject(key, target.stat().st_size, crc64_file(target, from_disk=True))
        if stored.crc64nvme != sent:
            raise StorageError(f"{self.uri}: {key!r} reads back other bytes than were written ({sent})")
        return stored

    def get_file(self, key: str, target: Path) -> None:
        source = self._path(key)
        with self._reported("copy", key):
            self._require_object(key, source)
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(target)
            try:
                _copy(source, temporary)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            fsync_path(target.parent)

    def head(self, key: str) -> StoredObject | None:
        path = self._path(key)
        with self._reported("look up", key):
            self._require_root()
            return _describe(key, path)

    def checksum(self, key: str) -> str:
        """CRC64NVME, computed from the bytes on disk."""
        path = self._path(key)
        with self._reported("read", key):
            self._require_object(key, path)
            return crc64_file(path, from_disk=True)

    def list(self, prefix: str) -> list[StoredObject]:
        """Every file whose key starts with ``prefix`` (which need not end at a folder), by key."""
        with self._reported("list", prefix):
            return sorted(self._below(prefix), key=lambda it: it.key)

    def holds(self, prefix: str = "") -> bool:
        with self._reported("list", prefix):
            return next(self._below(prefix), None) is not None

    def first(self, count: int) -> tuple[Sequence[StoredObject], bool]:
        with self._reported("list", ""):
            # One more than asked for shows whether these are all, without a walk through the rest.
            found = list(islice(self._below(""), count + 1))
        return found[:count], len(found) <= count

    def _below(self, prefix: str) -> Iterator[StoredObject]:
        self._require_root()
        found = (self._describe_at(path) for path in _files_below(self.root / prefix.rpartition("/")[0]))
        return (it for it in found if it is not None and it.key.startswith(prefix))

    def _describe_at(self, path: Path) -> StoredObject | None:
        key = path.relative_to(self.root).as_posix()
        return None if key.startswith(f"{_TEMPORARY}/") else _describe(key, path)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete files, then the folders this left empty; durable before it returns."""
        folders: set[Path] = set()
        for key in keys:
            path = self._path(key)
            with self._reported("delete", key):
                self._require_root()
                if _unlink(path):
                    folders.add(path.parent)
        for folder in folders:
            with self._reported("delete below", folder.relative_to(self.root).as_posix()):
                self._prune(folder)

    def abort_unfinished(self, before: float, prefix: str = "") -> int:
        """Remove what killed writers left in the folder of objects in the making (of any prefix: it is not known)."""
        count = 0
        with self._reported("clear", _TEMPORARY):
            for path in _files_below(self.root / _TEMPORARY):
                status = _describe(path.name, path)
                count += status is not None and (status.modified or 0) < before and _unlink(path)
        return count

    def _prune(self, folder: Path) -> None:
        while folder != self.root:
            try:
                folder.rmdir()
            # Another process has pruned it first.
            except FileNotFoundError:
                pass
            except OSError as error:
                # POSIX allows either error for a folder that is not empty.
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                break
            folder = folder.parent
        fsync_path(folder)

    def _path(self, key: str) -> Path:
        return path_below(self.root, key, [_TEMPORARY], origin=self.uri)

    def _require_root(self) -> None:
        if not self.root.is_dir():
            raise StorageError(f"{self.uri}: this folder does not exist (is its disk mounted?)")

    def _require_object(self, key: str, path: Path) -> None:
        self._require_root()
        if _describe(key, path) is None:
            raise MissingObjectError(f"{self.uri}: {key!r} does not exist")

    @contextmanager
    def _reported(self, action: str, key: str) -> Iterator[None]:
        """Raise an ``OSError`` as a storage error that names the action, the key and, where it helps, the remedy."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            problem = f"disk full ({error.strerror})" if full else str(error)
            raise StorageError(f"{self.uri}: cannot {action} {key!r}: {problem}") from error


def _in_its_folder(target: Path, create: Callable[[], _Result]) -> _Result:
    """Make the folder of ``target`` and create it there; once more if ``delete`` pruned the folder in between."""
    for _ in range(_PRUNED_TRIES):
        _make_folders(target.parent)
        try:
            return create()
        except FileNotFoundError:
            # Its folder is there, so something else is missing, such as the source.
            if target.parent.is_dir():
                raise
    raise FileNotFoundError(errno.ENOENT, "its folder keeps disappearing", str(target.parent))


def _make_folders(folder: Path) -> None:
    """Create ``folder`` and flush every entry on the way, so that a crash cannot lose a folder but keep its commit."""
    missing = [folder] if not folder.is_dir() else []
    while missing and not missing[-1].parent.is_dir():
        missing.append(missing[-1].parent)
    make_folders(folder)
    for made in missing:
        fsync_path(made.parent)


def _copy(source: Path, target: Path) -> str:
    """Copy to a new file and flush it; returns the CRC64NVME of the bytes sent."""
    crc = Crc64()
    # Created exclusively: no data key is ever written twice, so an existing file is an error.
    with source.open("rb", buffering=0) as reader, open(target, "xb", opener=opener) as writer:
        try:
            while chunk := reader.read(CHUNK_BYTES):
                crc.update(chunk)
                writer.write(chunk)
            writer.flush()
            os.fsync(writer.fileno())
        except OSError:
            target.unlink()  # a full disk stays fuller for every half copy that is left
            raise
    return crc.hexdigest()


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _describe(key: str, path: Path) -> StoredObject | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads to itself leads to no object
            return None
        raise
    return StoredObject(key, status.st_size, modified=status.st_mtime) if stat.S_ISREG(status.st_mode) else None


def _files_below(folder: Path) -> Iterator[Path]:
    def reported(error: OSError) -> None:
        # A folder that vanished between two calls is empty; any other error must not look like emptiness.
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    for current, _, names in os.walk(folder, onerror=reported):
        yield from (Path(current, name) for name in names)
