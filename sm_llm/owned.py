"""Folders and files of this user: as closed as the folder they are made in, and checked before they are used.

Only the standard library is used here: a plain image may hold nothing else yet.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIVATE = 0o700
GROUP_READABLE = 0o750
UMASK_ENVIRONMENT = "SM_LLM_UMASK"
"""Variable with the umask of whoever launched a local run, in octal: the program of a script job gets it back."""


def own_user(folder: Path) -> int:
    """The user that files of this process belong to in ``folder``; on some network disks it is another one."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        return os.fstat(probe.fileno()).st_uid


def private_folder(path: Path) -> Path:
    """``path`` as a folder that only this user may enter: it is made, or an own one is closed to others.

    Raises ``PermissionError`` for one that belongs to somebody else, or is a link of somebody else's, and ``OSError``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(PRIVATE)
    except FileExistsError:
        pass
    else:
        return path
    # By descriptor: a path could lead elsewhere between the check and the change.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        # The folder's owner, and that of a link which may stand in its place.
        for owner in {found.st_uid, path.lstat().st_uid} - {os.geteuid()}:
            if owner != own_user(path):
                raise PermissionError(f"{path} belongs to another user (number {owner})")
        if found.st_mode & 0o077:
            os.fchmod(descriptor, PRIVATE)
    finally:
        os.close(descriptor)
    return path


def temporary_folder() -> Path:
    """This user's own folder among the temporary files of the machine, the same in all processes.

    Raises ``PermissionError`` where somebody else has made it: another ``TMPDIR`` is the way out.
    """
    return private_folder(Path(tempfile.gettempdir()) / f"sm_llm-{os.geteuid()}")


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/sm_llm``, or the same below ``~/.cache``; touches nothing."""
    caches = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(caches).absolute() / "sm_llm"


def make_folders(folder: Path) -> None:
    """Make ``folder`` and what leads to it, as open to others as the folder above."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(0o700 | _open_to_others(folder.parent), exist_ok=True)


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """For ``open``: a new file is readable to nobody who may not list its folder."""
    parent = Path(path).parent
    # ``0o066``: a file does not inherit the right to execute from its folder.
    return os.open(path, flags | os.O_CLOEXEC, 0o600 | (_open_to_others(parent) & 0o066))


def _open_to_others(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode) & 0o077


def close_to_others(folder: Path) -> int:
    """Let all that this process makes from now on be as closed as ``folder``; returns the umask that held before."""
    # Others never get the right to write, however open the folder is.
    return os.umask(0o077 & ~_open_to_others(folder) | 0o022)
