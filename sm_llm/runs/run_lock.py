"""Whether any process of a run is alive: a lock on the run's folder that dies with its holders."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.owned import make_folders
from sm_llm.runs.run_paths import RunPaths

if TYPE_CHECKING:
    from collections.abc import Iterator

_ATTEMPTS = 5
# Readable by everybody, unlike the lock file itself.
_LOCKS = Path("/proc/locks")
_POLL_SECONDS = 0.01
# Whoever may open a file, if only to read it, may lock it for ever.
_LOCK_MODE = 0o600


class RunLock:
    """The lock file of a run. The kernel releases it when a holder ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def hold(self) -> RunLock:
        """Share the lock until ``release`` or the end of this process (and of children forked from it).

        Every process of a run holds it; also a context manager. Raises ``StorageError`` where locks do not work.
        """
        if self._descriptor is None:
            descriptor = _open(self.path)
            try:
                # ``flock`` and not POSIX locks: it survives a fork, and closing another descriptor of the file does not
                # end it.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            except OSError as error:
                os.close(descriptor)
                raise _no_locks(self.path, error) from error
            self._descriptor = descriptor
        return self

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self.hold()

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(run_root: Path) -> RunLock:
    """Share the lock of the run in ``run_root`` from now on; ``with hold(root):`` ends it with the block."""
    return RunLock(RunPaths(run_root).lock).hold()


def is_anyone_alive(run_root: Path) -> bool:
    """Whether some process holds the run's lock. Raises ``StorageError`` where locks do not work."""
    path = RunPaths(run_root).lock
    if not path.exists():
        return False
    # Somebody else's run: only its owner may open, and so lock, the file.
    if not os.access(path, os.W_OK):
        return _is_locked(path)
    # A check takes the lock for an instant, so two checks at once could each take the other for the run.
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_POLL_SECONDS)
        with _try_exclusive(path) as free:
            if free:
                return False
    return True


@contextmanager
def starting(run_root: Path) -> Iterator[bool]:
    """Held by a launcher from the check whether a run is alive until its first process holds the run's lock.

    Yields False if another launcher is doing just that.
    """
    make_folders(run_root)
    with _try_exclusive(RunPaths(run_root).starting_lock) as mine:
        yield mine


def is_starting(run_root: Path) -> bool:
    """Whether a launcher is just starting the run."""
    path = RunPaths(run_root).starting_lock
    if not path.exists():
        return False
    if not os.access(path, os.W_OK):
        return _is_locked(path)
    with _try_exclusive(path) as free:
        return not free


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait for, and hold, an exclusive lock on ``path``, a file that exists for this only."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a process of this machine holds a lock, as the kernel lists it for those who may not take it."""
    found = path.stat()
    # As in proc_locks(5): the device in hexadecimal digits, the inode as a decimal number.
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        return any(name in line.split() for line in _LOCKS.read_text().splitlines())
    except OSError:
        return False


@contextmanager
def _try_exclusive(path: Path) -> Iterator[bool]:
    descriptor = _open(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        except OSError as error:
            raise _no_locks(path, error) from error
        yield mine
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        make_folders(path.parent)
        # ``O_NOFOLLOW``: a link in place of the lock could make this process create a file elsewhere.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _LOCK_MODE)
        found = os.fstat(descriptor)
        if found.st_mode & 0o077 and found.st_uid == os.geteuid():  # of an earlier release
            os.fchmod(descriptor, _LOCK_MODE)
        return descriptor
    except OSError as error:
        raise StorageError(f"{path}: cannot be opened for locking: {error}") from error


def _no_locks(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path}: this file system does not lock files ({error}). Put the runs on one that does")
