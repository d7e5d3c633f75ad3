"""The folder in which torch.compile keeps what it has compiled, and what a killed compiler has left in it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from sm_llm.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

FOLDER_ENVIRONMENT = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable; a user's own is kept."""
BUILDING = "_CxxBuild"
"""Ends the name of the folder in which torch runs a C++ compiler; torch removes it when the compiler has succeeded."""
# Of libraries, object files and precompiled headers. torch takes one that is there for whole.
_COMPILED = (".so", ".o", ".gch", ".pch")


def open_folder(default: Path, environ: MutableMapping[str, str]) -> Path:
    """The folder that the user's variable names, else ``default``, made and named by the variable.

    Raises ``RunFailed`` for one that cannot be written to.
    """
    named = environ.get(FOLDER_ENVIRONMENT)
    environ[FOLDER_ENVIRONMENT] = named or str(default)
    folder = Path(environ[FOLDER_ENVIRONMENT])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions do not tell: a mount may be read-only, and /proc takes no files from anybody.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        remedy = "another folder, or unset it to use the scratch folder" if named else "a folder on another disk"
        raise RunFailed(
            f"{FOLDER_ENVIRONMENT} must name a folder that this process can write to, got {str(folder)!r} "
            f"({error.strerror}). Set it to {remedy}"
        ) from error


def remove_unfinished(folder: Path) -> list[str]:
    """Remove the files that killed compilers have left half-written in ``folder`` and beside it; returns their names.

    torch would load them: it only asks whether a file is there. What another process compiles now stays.
    """
    # Only here: the import makes the folder.
    from torch._inductor import codecache

    names = _remove(folder, folder.glob(f"*/*{BUILDING}"))
    # Of all this user's processes on the machine: torch keeps them in no folder that could be named.
    if (headers := getattr(codecache, "_HEADER_DIR", None)) is not None:
        names += _remove(Path(headers), Path(headers).glob(f"*{BUILDING}"))
    return sorted(names)


def _remove(root: Path, marks: Iterator[Path]) -> list[str]:
    removed = []
    for mark in list(marks):
        name = mark.name.removesuffix(BUILDING)
        try:
            # torch holds it while it compiles.
            with FileLock(root / "locks" / f"{name.partition('.')[0]}.lock", timeout=0):
                for path in (mark.with_name(name + suffix) for suffix in _COMPILED):
                    if path.exists():
                        path.unlink(missing_ok=True)
                        removed.append(path.name)
                # Last: until the files are gone it is what they are found by.
                shutil.rmtree(mark, ignore_errors=True)
        except (Timeout, OSError):
            continue
    return removed
