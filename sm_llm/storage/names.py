"""One check for every name that comes from elsewhere and becomes a path: of stores, hubs, manifests and checkpoints."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.storage.reports import report_unknown

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LONGEST_PART = 255
"""Bytes of one part of a path on the file systems of Linux and macOS."""
LONGEST_NAME = 1024
"""Bytes of a key in S3 (Amazon S3 User Guide, "Naming Amazon S3 objects")."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_DRIVE = re.compile(r"[A-Za-z]:")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|(?:com|lpt)[0-9\u00b9\u00b2\u00b3]|conin\$|conout\$|clock\$)")
"""Microsoft Learn, "Naming Files, Paths, and Namespaces"; compared as ``_folded``."""


def name_fault(name: str, reserved: Iterable[str] = ()) -> str:
    """Why ``name`` must not become a path below a folder, or "" if it may.

    A name is relative, with "/" between parts, none of them empty, ``.`` or ``..``, without control characters,
    backslashes and drive letters, at most 1,024 bytes long with parts of at most 255, and its first part is none of
    ``reserved``. What a file system takes for one of these counts as well: other case, other spellings of Unicode,
    characters without width, spaces and dots at the end. Names of devices on Windows are refused everywhere.
    """
    parts = name.split("/")
    if name.startswith("/") or _DRIVE.match(name):
        return "it is absolute"
    if any(part in ("", ".", "..") for part in parts):
        return "a part of it is empty, '.' or '..'"
    if _CONTROL.search(name) or "\\" in name:
        return "it holds a control character or a backslash"
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "it is not UTF-8"
    if sum(sizes) + len(parts) - 1 > LONGEST_NAME or max(sizes) > LONGEST_PART:
        return f"it is longer than {LONGEST_NAME:,} bytes, or a part of it than {LONGEST_PART}"
    folded = [_folded(part) for part in parts]
    if not all(folded):
        return "a part of it reads as empty, '.' or '..'"
    if device := next((part for part in folded if _DEVICE.fullmatch(part.partition(".")[0].rstrip())), ""):
        return f"{device} is the name of a device"
    if folded[0] in {_folded(it.rstrip("/")) for it in reserved}:
        return f"{parts[0]} is a name of our own"
    return ""


def _folded(part: str) -> str:
    """``part`` as a file system that ignores case, width, invisible characters and what comes last may read it."""
    plain = unicodedata.normalize("NFKC", part)
    return "".join(it for it in plain if unicodedata.category(it) != "Cf").casefold().rstrip(" .")


def paths_fault(paths: Iterable[str]) -> str:
    """Why files of these names cannot lie in one folder: one is there twice, or is a folder of another; else ""."""
    known: set[str] = set()
    for path in paths:
        if path in known:
            return f"{path!r} is named twice"
        known.add(path)
    for path in known:
        parts = path.split("/")
        if any("/".join(parts[:depth]) in known for depth in range(1, len(parts))):
            return f"{path!r} lies below a file"
    return ""


def path_below(folder: Path, name: str, reserved: Iterable[str] = (), *, origin: str = "") -> Path:
    """The path of ``name`` below ``folder``; touches nothing. ``origin`` is where the name comes from.

    Raises ``StorageError`` for a name that ``name_fault`` refuses.
    """
    if fault := name_fault(name, reserved):
        where = f"{origin}: " if origin else ""
        raise StorageError(f"{where}{name!r} cannot be the name of a file below {folder}: {fault}")
    return folder / name


def usable(keys: Iterable[str], place: str) -> list[str]:
    """Those of the keys listed at ``place`` that a file can have; the others are reported once and left where they are.

    For who deletes or copies what a listing holds: one foreign object must not stop that.
    """
    found: list[str] = []
    unknown: list[str] = []
    for key in keys:
        (unknown if name_fault(key) else found).append(key)
    report_unknown(place, unknown)
    return found
