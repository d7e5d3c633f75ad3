"""One check for every name that comes from elsewhere and becomes a path: of stores, hubs, manifests and checkpoints."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LONGEST_PART = 255
"""Bytes of one part of a path on the file systems of Linux and macOS."""
LONGEST_NAME = 1024
"""Bytes of a key in S3 (Amazon S3 User Guide, "Naming Amazon S3 objects")."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def name_fault(name: str, reserved: Iterable[str] = ()) -> str:
    """Why ``name`` must not become a path below a folder, or "" if it may.

    A name is relative, with "/" between parts, none of them empty, ``.`` or ``..``, without control characters,
    backslashes and drive letters, at most 1,024 bytes long with parts of at most 255, and its first part is none of
    ``reserved``.
    """
    parts = name.split("/")
    if name.startswith("/") or _DRIVE.match(name):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "a part of it is empty, '.' or '..'"
    if _CONTROL.search(name) or "\\" in name:
        return "it holds a control character or a backslash"
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > LONGEST_NAME or any(len(part.encode("utf-8", "surrogatepass")) > LONGEST_PART for part in parts):
        return f"it is longer than {LONGEST_NAME:,} bytes, or a part of it than {LONGEST_PART}"
    if parts[0].casefold() in {it.casefold().rstrip("/") for it in reserved}:
        return f"{parts[0]} is a name of our own"
    return ""


def path_below(folder: Path, name: str, reserved: Iterable[str] = (), *, origin: str = "") -> Path:
    """The path of ``name`` below ``folder``; touches nothing. ``origin`` says where the name comes from.

    Raises ``StorageError`` for a name that ``name_fault`` refuses.
    """
    if fault := name_fault(name, reserved):
        where = f"{origin}: " if origin else ""
        raise StorageError(f"{where}{name!r} cannot be the name of a file below {folder}: {fault}")
    return folder / name
