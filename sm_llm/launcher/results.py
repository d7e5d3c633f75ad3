"""What a run has published so far, as the launcher needs to know it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from sm_llm.errors import CheckpointError
from sm_llm.storage.publish import find_final, find_newest
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.storage.manifest import CommitManifest

RESULT_LINK = "result"
"""Name, in the run's folder, of a link to the published folder: for people, who type it. Programs follow the commit."""


def final_commit(root: Path, run_id: str) -> CommitManifest | None:
    """The commit of the run's result. Raises ``CheckpointError`` if it exists and is damaged."""
    return find_final(open_store(root), run_id=run_id)


def has_final(root: Path, run_id: str) -> bool:
    """Whether the run's result is published."""
    return final_commit(root, run_id) is not None


def has_checkpoint(root: Path, run_id: str) -> bool:
    """Whether a continued run would find a checkpoint to start from."""
    try:
        return find_newest(open_store(root), run_id=run_id).commit is not None
    except CheckpointError:
        return False


def result_folder(root: Path, run_id: str) -> Path | None:
    """The published result (a Hugging Face folder, or prepared rows), or None before it is published."""
    commit = final_commit(root, run_id)
    return None if commit is None else root / commit.save.data_prefix.rstrip("/")


def link_result(root: Path, target: Path) -> None:
    """Point ``<run>/result`` at the published folder; a file system without links simply has none."""
    link = root / RESULT_LINK
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, root))
