"""Which folder of this machine an address of a specification names, if it names one."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.terminal import counted, size

if TYPE_CHECKING:
    from sm_llm.spec.training import JsonRowsData, RowsData

# Files of a folder that are counted: more would delay every plan.
_MOST_FILES = 10_000
_STEP_OUTPUT = re.compile(r"steps\.(?P<step>[\w-]+)\.output(?:/.*)?")


def referenced_step(text: str | None) -> str | None:
    """The step whose output ``text`` names; None for anything else."""
    match = _STEP_OUTPUT.fullmatch(text or "")
    return match["step"] if match else None


def is_reference(text: str | None) -> bool:
    """Whether ``text`` names the output of a step that may not have run yet."""
    return referenced_step(text) is not None


def local_folder(uri: str | None, base: Path | None = None) -> Path | None:
    """The folder or file ``uri`` names on this machine; None for references and remote places.

    A relative path is taken from ``base``, by default the working directory.
    """
    from sm_llm.storage.uri import parse

    if uri is None or is_reference(uri) or uri.startswith("builtin:"):
        return None
    try:
        path = parse(uri).path
    except StorageError:
        return None
    if path is not None and base is not None and "://" not in uri:
        path = base / Path(uri).expanduser()
    # Not ``Path.exists``, which raises for a name that is too long and where a folder above may not be entered.
    return path if path is None or os.path.exists(path) else _published(path)


def contents(location: Path) -> str:
    """``12 files, 3.4 MB``: what a file or folder of this machine holds; of a very large folder that it is one."""
    found = [location] if location.is_file() else location.rglob("*")
    sizes: list[int] = []
    try:
        for it in found:
            if it.is_file():
                sizes.append(it.stat().st_size)
            # On a shared file system every size is a request of its own.
            if len(sizes) > _MOST_FILES:
                return f"more than {_MOST_FILES:,} files"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"{counted(len(sizes), 'file')}, {size(sum(sizes))}" if sizes else "no files"


def repeated_rows(data: RowsData | JsonRowsData) -> str | None:
    """How the rows to validate on are among those to train on, in words; None where they are not, as far as is known.

    Places are compared, and on this machine the files in them: links and copies are found, too.
    """
    if data.validation is None:
        return None
    train, validation = _normal(data.train), _normal(data.validation)
    if train == validation:
        return "is the location of task.data.train"
    # Line files are read from all folders below; rows only from the files that their own folder lists.
    if data.format == "json_rows" and f"{validation}/".startswith(f"{train}/"):
        return "lies in task.data.train, whose folders are read as well"
    if data.format == "json_rows" and f"{train}/".startswith(f"{validation}/"):
        return "holds the folder of task.data.train, which is read as well"
    own = {name: local_folder(getattr(data, name)) for name in ("train", "validation")}
    if not all(it is not None and it.is_dir() for it in own.values()):
        return None
    from sm_llm.data.content import repeated_files

    count, whole = repeated_files(data.model_copy(update={name: str(it) for name, it in own.items()}))
    return f"holds {count} of {counted(whole, 'file')} that task.data.train holds as well" if count else None


def _normal(location: str) -> str:
    """One text for a location, by whatever path it is named."""
    folder = local_folder(location)
    # A folder of this machine may be reached by links.
    return str(folder.resolve()) if folder is not None else posixpath.normpath(location).replace(":/", "://", 1)


# File systems of the kernel, which no folder of a user's can be made in, whatever the rights.
_OF_THE_KERNEL = frozenset({"proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "bpf"})
_LONGEST_NAME = 255
"""Bytes of a name in the usual file systems."""


def write_problem(folder: Path, *, is_on_this_machine: bool = True) -> str:
    """Why ``folder`` cannot be made or written; empty if it can, as far as that is known without writing.

    On another machine, which may share only some of its folders with this one, rights are not compared.
    """
    folder = folder.expanduser().absolute()
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in folder.parts):
        return f"has a name of more than {_LONGEST_NAME} bytes"
    # ``os.path`` and not ``Path.exists``, which raises where a folder above may not be entered.
    there = next(location for location in (folder, *folder.parents) if os.path.lexists(location))
    below = "" if there == folder else f"lies below {there}, which "
    if not there.is_dir():
        return f"{below}is a {'file' if os.path.exists(there) else 'link to a place that is not there'}"
    if not is_on_this_machine:
        return ""
    if _file_system(there) in _OF_THE_KERNEL:
        return f"{below}is part of a file system of the kernel, where no folder can be made"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{below}is on a file system that is read only"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{below}may not be written by you"


def _file_system(location: Path) -> str:
    """The type of the file system that holds a path that exists; empty where the kernel does not list it."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mounts = {fields[1]: fields[2] for line in lines if len(fields := line.split()) > 2}
    resolved = location.resolve()
    return next((mounts[str(it)] for it in (resolved, *resolved.parents) if str(it) in mounts), "")


def _published(path: Path) -> Path:
    """The folder that ``RUN/result/…`` stands for, on a file system without links; the path itself for any other."""
    from sm_llm.storage.publication.result import result_address

    try:
        return Path(result_address(str(path)))
    except (StorageError, CheckpointError):
        return path
