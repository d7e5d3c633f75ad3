"""The copy of a user's program that a node runs, so that nothing it writes lands in the user's own folder."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from sm_llm.contract.run_folders import is_run_folder, runs_sentence

_LEFT_OUT = (".git", ".venv", "venv", "__pycache__", "*.pyc", "node_modules", "runs")


def copy_program(source: Path, target: Path) -> list[str]:
    """Copy ``source`` to ``target``, which may lie inside it; what links lead to is copied.

    Folders of runs, this copy's own place and links to a folder that holds them are left out. Returns sentences to
    report on what was left out, but for caches and the like, which are left out by name.
    """
    own = {target.resolve(), target.parent.resolve()}
    runs: list[Path] = []
    loops: list[str] = []

    def ignore(folder: str, names: list[str]) -> set[str]:
        out = set()
        for name in names:
            path = Path(folder, name)
            if any(fnmatch(name, pattern) for pattern in _LEFT_OUT):
                out.add(name)
            elif path.is_dir() and (path.resolve() in own or is_run_folder(path)):
                out.add(name)
                runs.append(path)
            elif path.is_symlink() and path.is_dir() and _leads_back(path, source):
                out.add(name)
                loops.append(os.path.relpath(path, source))
        return out

    shutil.copytree(source, target, ignore=ignore, symlinks=False)
    told = [runs_sentence("task.source", source, runs)] if runs else []
    return [*told, *(f"task.source: the link {name} leads to a folder that holds it: left out" for name in loops)]


def _leads_back(link: Path, source: Path) -> bool:
    """Whether ``link`` leads to what holds a folder on the way to it from ``source``, through other links as well."""
    goal = link.resolve()
    way = [it for it in link.parents if it.is_relative_to(source)]
    return any(folder.resolve().is_relative_to(goal) for folder in way)
