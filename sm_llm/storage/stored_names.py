"""Names that lie in a store: which of them become paths here, and which are reported and left alone."""

from __future__ import annotations

import logging
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

from sm_llm.errors import StorageError
from sm_llm.file_names import name_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


_LOG = logging.getLogger(__name__)


# The cache is what remembers reported problems; its size bounds the memory of a long run.
@lru_cache(maxsize=4096)
def _reports(location: str, problem: str) -> Iterator[int]:
    """Counts the reports of one problem at an address."""
    return count()


def report_once(location: str, problem: str, detail: str = "") -> None:
    """Warn of ``problem`` at an address, unless this process has done so before; with the ``detail`` of the first."""
    if next(_reports(location, problem)) == 0:
        _LOG.warning("%s: %s%s", location, problem, f" ({detail})" if detail else "")


def report_unknown(location: str, names: Iterable[str]) -> None:
    """Warn once of names at an address that nothing of ours has; nobody reads what lies there."""
    if found := sorted(set(names)):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        report_once(location, f"ignored {found[0]!r}{more}: not a file of a run")


def path_below(folder: Path, name: str, reserved: Iterable[str] = (), *, origin: str = "") -> Path:
    """The path of ``name`` below ``folder``; touches nothing. ``origin`` is where the name comes from.

    Raises ``StorageError`` for a name that ``name_problem`` refuses.
    """
    if fault := name_problem(name, reserved):
        where = f"{origin}: " if origin else ""
        raise StorageError(f"{where}{name!r} cannot be the name of a file below {folder}: {fault}")
    return folder / name


def usable(keys: Iterable[str], location: str) -> list[str]:
    """Those of the keys listed at ``location`` that a file can have; others are reported once and left where they are.

    For who deletes or copies what a listing holds: one foreign object must not stop that.
    """
    found: list[str] = []
    unknown: list[str] = []
    for key in keys:
        (unknown if name_problem(key) else found).append(key)
    report_unknown(location, unknown)
    return found
