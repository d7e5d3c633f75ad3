"""Folders of runs inside a folder that something else is read from: what runs write is nobody's program and no text."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sm_llm.runs.run_paths import RUN_RECORD
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from pathlib import Path

# A run.json of another program does not have it.
_RUN_ID = b'"run_id"'


def is_run_folder(folder: Path) -> bool:
    """Whether ``folder`` is the folder of a run: it holds a run's record."""
    try:
        # Searched and not parsed: a damaged record, or one of another release, marks a run's folder just as well.
        return _RUN_ID in (folder / RUN_RECORD).read_bytes()
    except OSError:
        return False


def files_outside_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """All files below ``folder`` in order of path but those of runs, and the folders of these runs."""
    files: list[Path] = []
    runs: list[Path] = []
    for current, names, found in os.walk(folder):
        below = {name: folder.joinpath(current, name) for name in names}
        own = {name for name, path in below.items() if is_run_folder(path)}
        runs += [below[name] for name in own]
        # In place, so that ``os.walk`` does not enter them.
        names[:] = [name for name in names if name not in own]
        files += [path for name in found if (path := folder.joinpath(current, name)).is_file()]
    return sorted(files), sorted(runs)


def runs_sentence(name: object, folder: Path, runs: list[Path]) -> str:
    """That ``runs`` inside ``folder``, which is called ``name``, are left out."""
    locations = sorted({path.parent.relative_to(folder).as_posix() for path in runs})
    return f"{name}: {counted(len(runs), 'run folder')} left out (in {', '.join(locations)})"
