"""What the two halves of a sync share: its settings, its report and its progress."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.storage.base import Transfer
    from sm_llm.storage.syncing.selection import LeftOut, Selection


@dataclass
class SyncReport:
    """What a sync found and did; sizes in bytes."""

    source: str
    destination: str
    copied: list[str] = field(default_factory=list)
    copied_size: int = 0
    unchanged: int = 0
    unchanged_size: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    """Fetched files of which S3 keeps no checksum that we know: their length is right, more is not known."""
    engines: list[str] = field(default_factory=list)
    """Which engine moved how much, and why another took over."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SyncSettings:
    """How one sync goes about it."""

    selection: Selection
    transfer: Transfer
    dry_run: bool
    progress: Callable[[int, int], None]
    report: SyncReport


class SyncProgress:
    """Turns increments from several threads into (done, total)."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()
        progress(0, total)

    def __call__(self, increment: int) -> None:
        with self._lock:
            self._done += increment
            self._progress(self._done, self._total)
