"""What a run has published so far, as the launcher needs to know it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.errors import CheckpointError
from sm_llm.storage.files import link_tree
from sm_llm.storage.publication.publish import find_final, find_newest
from sm_llm.storage.publication.result import RESULT
from sm_llm.storage.uri import join, parse

if TYPE_CHECKING:
    from sm_llm.runs.run_store import RunStore

RESULT_LINK = RESULT
"""Name, in the run's folder, of a link to the published folder: for people, who type it. Programs follow the commit."""


def has_final(run_store: RunStore, run_id: str) -> bool:
    """Whether the run's result is published. Raises ``CheckpointError`` if it is damaged."""
    return find_final(run_store.store, run_id=run_id) is not None


def has_checkpoint(run_store: RunStore, run_id: str) -> bool:
    """Whether a continued run would find a checkpoint to start from."""
    try:
        return find_newest(run_store.store, run_id=run_id).commit is not None
    except CheckpointError:
        return False


def result_location(run_store: RunStore, run_id: str) -> Path | str | None:
    """The published result (a Hugging Face folder, or prepared rows): a folder, or its address in S3.

    None before it is published. Raises ``CheckpointError`` if it is damaged.
    """
    commit = find_final(run_store.store, run_id=run_id)
    if commit is None:
        return None
    uri = join(run_store.uri, commit.save.data_prefix.rstrip("/"))
    return parse(uri).path or uri


def link_result(run_store: RunStore, location: Path | str | None) -> None:
    """Point ``<run>/result`` at a published folder; in S3 there is none.

    Where there are no symbolic links it is a folder of hard links to the same files.
    """
    if run_store.is_remote or location is None:
        return
    link, temporary = run_store.root / RESULT_LINK, run_store.root / f".{RESULT_LINK}-{secrets.token_hex(4)}"
    # Programs follow the commit, so a run does not fail for want of a link.
    with contextlib.suppress(OSError):
        try:
            temporary.symlink_to(os.path.relpath(location, run_store.root))
        except OSError:
            link_tree(Path(location), temporary)
        # A rename puts no link in the place of a folder, and no folder in the place of one that holds anything.
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        elif not temporary.is_symlink():
            link.unlink(missing_ok=True)  # a folder does not take the place of a link
        temporary.replace(link)
