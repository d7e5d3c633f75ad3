"""Which files of a user's folder belong to its program: the same for the code bundle and for a node's copy."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from sm_llm.runs.run_folders import is_run_folder

if TYPE_CHECKING:
    from collections.abc import Callable

IGNORE_FILE = ".smllmignore"
"""File in the folder's root with patterns in Git's own syntax; what they match is left out, and so is it."""

_ALWAYS_OUT = (
    ".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", "*.pyc", "*.egg-info", ".ipynb_checkpoints",
    ".mypy_cache", ".pytest_cache", ".ruff_cache", ".DS_Store", "runs", IGNORE_FILE,
)  # fmt: skip


class ProgramTree:
    """The rules of the folder ``root``: patterns of its ``.smllmignore``, names that are never code, folders of runs.

    Raises ``OSError`` and ``ValueError`` for an ignore file that cannot be read or holds what is not a pattern.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._patterns = _patterns(root / IGNORE_FILE)

    def leaves_out(self, name: str) -> bool:
        """Whether a file or folder is left out; ``name`` is relative to the root, with "/"."""
        path = self.root / name
        is_folder = path.is_dir()
        own = any(fnmatch(path.name, it) for it in _ALWAYS_OUT) or self.matches(name, is_folder=is_folder)
        return own or (is_folder and is_run_folder(path))

    def matches(self, name: str, *, is_folder: bool) -> bool:
        """Whether a pattern of the ignore file matches."""
        return self._patterns(f"{name}/" if is_folder else name)

    def holds(self, name: str) -> bool:
        """Whether there is a file ``name``, and neither it nor a folder on the way to it is left out."""
        folders = [it.as_posix() for it in PurePosixPath(name).parents][:-1]
        return (self.root / name).is_file() and not any(self.leaves_out(it) for it in (*folders, name))

    def files(self) -> list[Path]:
        """All files that are not left out, in order of path; what linked folders hold is not among them."""
        kept: list[Path] = []
        for current, names, found in os.walk(self.root):
            folder = PurePosixPath(Path(current).relative_to(self.root).as_posix())
            # In place, so that ``os.walk`` does not enter what is left out.
            names[:] = [it for it in names if not self.leaves_out(str(folder / it))]
            kept += [Path(current, it) for it in found if not self.leaves_out(str(folder / it))]
        return sorted(path for path in kept if path.is_file())


def _patterns(file: Path) -> Callable[[str], bool]:
    if not file.is_file():
        return lambda name: False
    # Only a folder with an ignore file needs the library.
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(file.read_text(encoding="utf-8").splitlines()).match_file
