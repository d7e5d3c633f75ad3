"""What a program left in a folder that is published, as plain files with names that every store takes.

A program that has ended well must not lose its work to one odd entry: what cannot be published is left out or gets
another name, and is reported.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.file_names import name_problem
from sm_llm.storage.files import WalkedFile, link_file, walk_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

RENAMED = "renamed"
"""Folder in a result, or in a checkpoint, with the files whose own names no store takes."""
_SHOWN = 20
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST_STEM = 100


def make_plain(folder: Path, within: Sequence[Path]) -> list[str]:
    """Replace links in ``folder`` to files below one of ``within`` by these files; remove what is not a regular file.

    Returns sentences about what was left out. Raises ``OSError`` for what cannot be read.
    """
    if not folder.is_dir():
        return []
    found = list(walk_files(folder, within))  # all of it before the first link is removed
    left_out = [it for it in found if it.path is None]
    for entry in list(_odd(folder)):
        entry.unlink()
    for name, path, _ in found:
        if path is None or (target := folder / name).exists():
            continue
        try:
            link_file(path, target)
        except OSError as error:
            left_out.append(WalkedFile(name, None, f"leads to {path}, which cannot be copied: {error}"))
    return sentences(folder, left_out)


def _odd(folder: Path) -> Iterator[Path]:
    """Links and what else is neither a file nor a folder; links are not followed."""
    for current, folders, names in os.walk(folder):
        for path in (Path(current, it) for it in (*folders, *names)):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                yield path


def sentences(folder: Path, left_out: Iterable[WalkedFile]) -> list[str]:
    """What to report of entries that are not published."""
    lines = [f"{folder.name}/{name} is not published: it {problem}" for name, _, problem in left_out]
    return (
        lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"{folder.name}/: {len(lines) - _SHOWN} more are left out"]
    )


def make_names_usable(folder: Path) -> list[str]:
    """Give files whose names no store takes other ones; returns a sentence about each."""
    faulty = [(it.name, fault) for it in walk_files(folder) if (fault := name_problem(it.name))]
    lines = []
    for name, fault in faulty:
        target = f"{RENAMED}/{_safe(name)}"
        (folder / RENAMED).mkdir(exist_ok=True)
        (folder / name).replace(folder / target)
        lines.append(f"{name!r} cannot be the name of a published file ({fault}): it is published as {target}")
    return lines


def _safe(name: str) -> str:
    """A name made of ``name``'s digest, so that no two are equal, and of what a store takes of it."""
    last = Path(name.rpartition("/")[2])
    suffix = last.suffix if not _UNSAFE.search(last.suffix[1:]) else ""
    return f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}-{_UNSAFE.sub('_', last.stem)[:_LONGEST_STEM]}{suffix}"
