"""Keeps a node's part of the newest checkpoint on its own disk, so that a restart need not fetch it from the store."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FOLDER = "restored"
_SAVING = "saving"
_SEALED = ".sealed"
# Saves that must fit on the disk beside the copy: the one that is being written, and one that waits.
_ROOM = 2


class LocalCopies:
    """The copies below a folder of the node, each in a folder with the id of its save.

    One is kept while there is space, and nothing of it is believed: whoever restores compares every file with the
    commit. Only the node's leader changes anything here.
    """

    def __init__(self, root: Path) -> None:
        # Where checkpoints lie that were fetched, or kept.
        self.folder = root / _FOLDER
        # Where saves are written and sealed.
        self.saving = root / _SAVING

    def sealed(self, save_id: str) -> Path:
        """The name of a save that is complete on this disk."""
        return self.saving / f"{save_id}{_SEALED}"

    def adopt(self) -> None:
        """Keep what an attempt that was killed had sealed: it may have been committed; remove what was half-written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for found in list(_entries(self.saving)):
            if found.name.endswith(_SEALED):
                _move(found, self.folder / found.name.removesuffix(_SEALED))
        shutil.rmtree(self.saving, ignore_errors=True)

    def keep(self, sealed: Path, save_id: str) -> None:
        """Let a sealed save, which was committed under ``save_id``, be the one copy."""
        kept = self.folder / save_id
        self.folder.mkdir(parents=True, exist_ok=True)
        _move(sealed, kept)
        self.keep_only(save_id)

    def keep_only(self, save_id: str | None) -> None:
        """Remove every copy but that of ``save_id``, and of None all; the marker beside a copy bears its name."""
        for found in list(_entries(self.folder)):
            if save_id is None or not found.name.startswith(save_id):
                remove(found)

    def forget(self) -> None:
        """Remove all of them: the run has its result."""
        for folder in (self.folder, self.saving):
            shutil.rmtree(folder, ignore_errors=True)

    def make_room(self) -> None:
        """Remove the copy where the disk has too little space for the saves of the node beside it."""
        held = max((_size(it) for it in _entries(self.folder) if it.is_dir()), default=0)
        if held and shutil.disk_usage(self.folder).free < _ROOM * held:
            self.keep_only(None)


def remove(path: Path) -> None:
    """Remove a file or a folder; what is gone is gone."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Rename a folder on one disk; a folder that cannot be renamed is removed, since it is only a copy."""
    try:
        remove(target)
        source.rename(target)
    except OSError:
        shutil.rmtree(source, ignore_errors=True)


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _size(folder: Path) -> int:
    """Bytes of a copy; 0 for one that goes meanwhile: the thread that publishes keeps the newest alone."""
    try:
        return sum(it.stat().st_size for it in folder.rglob("*") if it.is_file())
    except FileNotFoundError:
        return 0
