"""The copy of a user's program that a node runs, so that nothing it writes lands in the user's own folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from sm_llm.contract.program_tree import IGNORE_FILE, ProgramTree
from sm_llm.errors import RunFailed
from sm_llm.runs.run_folders import is_run_folder, runs_sentence

_SHOWN = 5


def copy_program(source: Path, target: Path) -> list[str]:
    """Copy ``source`` to ``target``, which may lie inside it; what links lead to is copied.

    What a bundle would leave out (``ProgramTree``), this copy's own place and links to a folder that holds them are
    left out. Returns sentences to report on what was left out, but for caches and the like, which are left out by
    name. Raises ``RunFailed`` for an ignore file that cannot be used.
    """
    try:
        rules = ProgramTree(source)
    except (OSError, ValueError) as error:
        raise RunFailed(f"{source / IGNORE_FILE}: cannot be read: {error}") from error
    # ``copytree`` lists folders as it enters them: a target inside the source would be copied into itself.
    own = {target.resolve(), target.parent.resolve()}
    runs: list[Path] = []
    loops: list[str] = []
    ignored: list[str] = []

    def ignore(folder: str, names: list[str]) -> set[str]:
        out = set()
        for name in names:
            path = Path(folder, name)
            is_folder, inside = path.is_dir(), path.relative_to(source).as_posix()
            if rules.matches(inside, is_folder=is_folder):
                ignored.append(inside)
            elif is_folder and (path.resolve() in own or is_run_folder(path)):
                runs.append(path)
            # ``symlinks=False`` follows links, and ``copytree`` does not notice a circle.
            elif path.is_symlink() and is_folder and _leads_back(path, source):
                loops.append(inside)
            elif not rules.leaves_out(inside):
                continue
            out.add(name)
        return out

    shutil.copytree(source, target, ignore=ignore, symlinks=False)
    reported = [runs_sentence("task.source", source, runs)] if runs else []
    if ignored:
        more = f" and {len(ignored) - _SHOWN} more" if len(ignored) > _SHOWN else ""
        reported.append(f"task.source: left out by {IGNORE_FILE}: {', '.join(sorted(ignored)[:_SHOWN])}{more}")
    return [*reported, *(f"task.source: the link {name} leads to a folder that holds it: left out" for name in loops)]


def _leads_back(link: Path, source: Path) -> bool:
    """Whether ``link`` leads to what holds a folder on the way to it from ``source``, through other links as well."""
    goal = link.resolve()
    way = [it for it in link.parents if it.is_relative_to(source)]
    return any(folder.resolve().is_relative_to(goal) for folder in way)
