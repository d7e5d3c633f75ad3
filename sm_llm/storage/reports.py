"""Reports what lies in a storage and is none of our files: once per process, and without stopping anything."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOG = logging.getLogger(__name__)


@lru_cache(maxsize=4096)
def report_once(place: str, problem: str) -> None:
    """Warn of ``problem`` at an address, unless this process has done so before."""
    _LOG.warning("%s: %s", place, problem)


def report_unknown(place: str, names: Iterable[str]) -> None:
    """Warn once of names at an address that nothing of ours has; nobody reads what lies there."""
    if found := sorted(set(names)):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        report_once(place, f"ignored {found[0]!r}{more}: not a file of a run")
