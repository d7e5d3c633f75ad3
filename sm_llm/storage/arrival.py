"""A fetched file on local disk: half there with its journal, then verified, then under its own name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sm_llm.file_names import PART
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.files import extensible, fsync_path

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sm_llm.storage.base import Copy

# What s5cmd and s3transfer call a file in the making: the name they were given and some random characters.
_ENGINE_LEFTOVER = re.compile(rf"(.*{re.escape(PART)})\.?[0-9A-Za-z]{{6,}}")


def part_of(path: Path) -> Path:
    """Where the bytes of ``path`` lie until they are verified."""
    return path.with_name(extensible(path.name) + PART)


def journal_of(part: Path) -> Path:
    """The list of finished ranges beside a half-fetched file."""
    return part.with_name(f"{part.name}.ranges")


def is_half_fetched(part: Path) -> bool:
    """Whether an earlier download left a file here that can be finished."""
    return part.is_file() and journal_of(part).is_file()


def accept(copy: Copy, final: Path, checksum: str) -> bool:
    """Give a fetched file its name if its bytes, read back from the device, are right; else remove them.

    An empty ``checksum`` means that nobody knows one, and only the size is compared. Durable when it returns.
    Raises ``OSError``.
    """
    fsync_path(copy.path)  # pages that are still dirty cannot be dropped, and would be compared from memory
    right = copy.path.stat().st_size == copy.size
    right = right and (not checksum or crc64_file(copy.path, from_disk=True) == checksum)
    if right:
        copy.path.replace(final)
        fsync_path(final.parent)
    else:
        copy.path.unlink()
    # The journal goes last: without its file it counts for nothing (``is_half_fetched``).
    journal_of(copy.path).unlink(missing_ok=True)
    return right


def clear_leftovers(parts: Iterable[Path]) -> None:
    """Remove what engines that were killed left beside ``parts``; it can have holes and cannot be continued."""
    names: dict[Path, set[str]] = {}
    for part in parts:
        names.setdefault(part.parent, set()).add(part.name)
    for folder, wanted in names.items():
        for path in folder.iterdir() if folder.is_dir() else ():
            match = _ENGINE_LEFTOVER.fullmatch(path.name)
            # The pattern fits the name of a journal as well, which belongs to a file that can be continued.
            if match and match[1] in wanted and path.suffix != ".ranges":
                path.unlink(missing_ok=True)
