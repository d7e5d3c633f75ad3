"""Durable local files: whole or not there, on disk and not only in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sm_llm.owned import make_folders, opener

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Bytes; the file systems of Linux take 255.
_LONGEST_NAME = 205
# What a folder may hold beside files, folders, links and devices.
_KINDS = {stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}


def fsync_path(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the device. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flush every file and folder below ``folder``, and itself."""
    for current, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            fsync_path(Path(current, name))
        fsync_path(Path(current))


def _raise(error: OSError) -> None:
    raise error


class WalkedFile(NamedTuple):
    """One entry of a folder: its name below it, with "/", and the regular file that it is or leads to.

    ``problem`` is why a copy leaves it out; then ``path`` is None.
    """

    name: str
    path: Path | None
    problem: str = ""


def walk_files(folder: Path, within: Sequence[Path] = ()) -> Iterator[WalkedFile]:
    """What a copy of ``folder`` holds, by name: its files, and those that links in it lead to.

    Left out are links that lead nowhere, back to a folder that holds them or, where ``within`` names folders, outside
    all of these; and what is not a regular file. Raises ``OSError`` for what vanishes meanwhile or cannot be read.
    """
    roots = [it.resolve() for it in within]
    yield from _walk(folder, "", (folder.resolve(),), roots)


def _walk(folder: Path, above: str, holders: tuple[Path, ...], roots: Sequence[Path]) -> Iterator[WalkedFile]:
    for entry in sorted(os.scandir(folder), key=lambda it: it.name):
        name, location = f"{above}{entry.name}", Path(entry.path)
        if entry.is_symlink():
            try:
                location = location.resolve(strict=True)
            except (OSError, RuntimeError):  # the second for a link to itself
                yield WalkedFile(name, None, "is a link that leads nowhere")
                continue
            if roots and not any(location.is_relative_to(it) for it in roots):
                yield WalkedFile(name, None, f"is a link to {location}, outside the program's folders")
                continue
        mode = location.stat().st_mode
        if stat.S_ISREG(mode):
            yield WalkedFile(name, location)
        elif not stat.S_ISDIR(mode):
            yield WalkedFile(name, None, f"is a {_KINDS.get(stat.S_IFMT(mode), 'device')}, not a file")
        elif (real := location.resolve()) in holders:
            yield WalkedFile(name, None, "is a link to a folder that holds it")
        else:
            yield from _walk(location, f"{name}/", (*holders, real), roots)


def link_tree(source: Path, target: Path) -> list[WalkedFile]:
    """The files of ``source`` below ``target``, as hard links where that works; a link in it becomes its content.

    Returns what ``walk_files`` leaves out. Raises ``OSError`` for anything that vanishes meanwhile or cannot be read.
    """
    target.mkdir(parents=True, exist_ok=True)
    left_out = []
    for found in walk_files(source):
        if found.path is None:
            left_out.append(found)
        else:
            link_file(found.path, target / found.name)
    return left_out


def link_file(origin: Path, target: Path) -> None:
    """``origin``, which is not a link, as ``target``: a hard link where that works, else a copy. Raises ``OSError``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(origin, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copy2(origin, target)


def drop_cache(descriptor: int, begin: int = 0, length: int = 0) -> None:
    """Ask the kernel to drop the clean cached pages of an open file, or of ``length`` bytes (0: to its end) of it.

    Linux begins to write those that are not clean. Does nothing where that is not offered.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_DONTNEED)


def extensible(name: str) -> str:
    """``name`` with space for 50 bytes more; a long one as its beginning and a digest of all of it."""
    body = os.fsencode(name)
    if len(body) <= _LONGEST_NAME:
        return name
    begin = body[: _LONGEST_NAME - 17].decode("utf-8", errors="ignore")
    return f"{begin}~{hashlib.sha256(body).hexdigest()[:16]}"


def temporary_name(path: Path) -> Path:
    """A fresh name beside ``path``."""
    return path.with_name(f".{extensible(path.name)}.{secrets.token_hex(8)}.tmp")


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most ``most`` bytes.

    Raises ``OSError``, also for a pipe or a device, which could keep a reader waiting for ever, and for a larger file.
    """
    # Without ``O_NONBLOCK``, opening a pipe that nobody writes to would wait for ever.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        if not stat.S_ISREG(mode := os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a regular file", str(path))
        # The size that ``fstat`` reports may be out of date: one byte too many shows that the file has grown.
        body = stream.read(most + 1)
    if len(body) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes, which are too many to be read", str(path))
    return body


def write_new(path: Path, body: bytes) -> None:
    """Create a file that must not exist and flush its bytes. Raises ``FileExistsError`` or another ``OSError``."""
    with open(path, "xb", opener=opener) as stream:
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(path: Path, body: bytes | str) -> None:
    """Replace ``path`` by ``body`` in one step: a reader sees the old file or the new one, also after a crash.

    Text is written as UTF-8; missing parent folders are made. Raises ``OSError``.
    """
    make_folders(path.parent)
    temporary = temporary_name(path)
    try:
        write_new(temporary, body.encode("utf-8") if isinstance(body, str) else body)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)
