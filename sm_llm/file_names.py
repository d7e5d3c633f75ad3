"""One check for every name that comes from elsewhere and becomes a path: of stores, hubs, manifests and checkpoints."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LONGEST_PART = 255
"""Bytes of one part of a path on the file systems of Linux and macOS."""
LONGEST_NAME = 1024
"""Bytes of a key in S3 (Amazon S3 User Guide, "Naming Amazon S3 objects")."""
PART = ".sm_llm.part"
"""Behind the name of a file that is being fetched; no file that somebody else named may have it."""
# Of terminals and of lines, and marks of direction, behind which another ending hides.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_DRIVE = re.compile(r"[A-Za-z]:")
# Microsoft Learn, "Naming Files, Paths, and Namespaces"; compared as ``_folded``.
_DEVICE = re.compile(r"(?:con|prn|aux|nul|(?:com|lpt)[0-9\u00b9\u00b2\u00b3]|conin\$|conout\$|clock\$)")
# Behind the name of a device; a colon also stands before the name of a stream of a file.
_SUFFIX = re.compile("[.:]")


def name_problem(name: str, reserved: Iterable[str] = ()) -> str:
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
    # From here on as a file system may read the parts, not as they are written.
    folded = [_folded(part) for part in parts]
    if not all(folded):
        return "a part of it reads as empty, '.' or '..'"
    if device := next((part for part in folded if _DEVICE.fullmatch(_SUFFIX.split(part)[0].rstrip())), ""):
        return f"{device} is the name of a device"
    if any(PART in part for part in folded):
        return f"a name with {PART} is that of a file in the making"
    if folded[0] in {_folded(it.rstrip("/")) for it in reserved}:
        return f"{parts[0]} is a name of our own"
    return ""


def brought_problem(name: str, reserved: Iterable[str] = ()) -> str:
    """``name_problem`` of a file that is brought into a folder of the user's: no part may be a git repository's own.

    A ``.git/config`` or hook that arrives in a checkout is a program that the next git command runs.
    """
    # ``git~1`` is the short name that Windows gives to ``.git``; a colon begins the name of a stream of a file.
    if any(_folded(part).partition(":")[0] in (".git", "git~1") for part in name.split("/")):
        return ".git is the folder of a repository, whose files are programs"
    return name_problem(name, reserved)


def _folded(part: str) -> str:
    """``part`` as a file system that ignores case, width, invisible characters and what comes last may read it."""
    if part.isascii():
        return part.lower().rstrip(" .")
    # "Cf" are format characters, which take no width.
    plain = unicodedata.normalize("NFKC", part)
    return "".join(it for it in plain if unicodedata.category(it) != "Cf").casefold().rstrip(" .")


def paths_problem(paths: Iterable[str]) -> str:
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
