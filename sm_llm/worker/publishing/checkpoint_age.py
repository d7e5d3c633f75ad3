"""How old the newest published checkpoint is, and when that is too old."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from sm_llm.runs.events.checkpoints import PublicationLate

if TYPE_CHECKING:
    from collections.abc import Callable

LATE_SECONDS = 60.0
"""A publication is never called late before this: a short interval between saves shows little about a store."""
_LATE_FACTOR = 2.0


class CheckpointAge:
    """What was saved, what of it is published, and what was left out. One per process; threads may share it.

    A publication is late when the oldest save that it would cover began longer ago than twice the interval between
    saves, or twice the longest publication so far, whichever is more; never within a minute.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._published_at = self._saved_at = clock()
        self._step: int | None = None
        self._begun: dict[int, float] = {}
        self._interval = self._longest = 0.0
        self._superseded: list[int] = []
        self._reported_at_age = 0.0

    @property
    def step(self) -> int | None:
        """The newest published step, or that training began with."""
        return self._step

    def begin(self, step: int) -> None:
        """Training continues from a published checkpoint."""
        with self._lock:
            self._step, self._published_at, self._saved_at = step, self._clock(), self._clock()
            self._begun.clear()
            self._reported_at_age = 0.0

    def saved(self, step: int) -> None:
        """A save of ``step`` begins."""
        with self._lock:
            now = self._clock()
            # The limit follows the pace of this run: a save every hour makes a publication of minutes no alarm.
            self._interval, self._saved_at = now - self._saved_at, now
            self._begun[step] = now

    def superseded(self, step: int) -> None:
        """A newer save took the place of this one, which was not published yet."""
        with self._lock:
            self._superseded.append(step)

    def published(self, step: int) -> int:
        """Returns how many saves were left out for it."""
        with self._lock:
            now = self._clock()
            self._longest = max(self._longest, now - self._begun.get(step, now))
            # Older saves that were replaced are covered by this one: their work is safe.
            self._begun = {it: began for it, began in self._begun.items() if it > step}
            self._step, self._published_at, self._reported_at_age = step, now, 0.0
            before, self._superseded = self._superseded, [it for it in self._superseded if it > step]
            return len(before) - len(self._superseded)

    @property
    def unpublished_seconds(self) -> float:
        """How long the oldest save that no published one covers has been waiting; 0 without any."""
        with self._lock:
            return self._unpublished()

    def _unpublished(self) -> float:
        return max((self._clock() - began for began in self._begun.values()), default=0.0)

    @property
    def sentence(self) -> str:
        """For the training line: empty unless publication is late."""
        with self._lock:
            return self._sentence() if self._reported_at_age else ""

    def _sentence(self) -> str:
        newest = "no checkpoint published" if self._step is None else f"last published step {self._step}"
        return f"{newest}, {self._clock() - self._published_at:,.0f} s ago"

    def late(self) -> PublicationLate | None:
        """The alarm, when it becomes due, and again whenever the delay has doubled."""
        with self._lock:
            waiting = self._unpublished()
            limit = max(LATE_SECONDS, _LATE_FACTOR * max(self._interval, self._longest))
            if waiting <= max(limit, 2 * self._reported_at_age):
                return None
            return self._alarm(f"the store is slow: publications are called late after {limit:,.0f} s")

    def failed(self, reason: str) -> PublicationLate:
        """The alarm for a publication that failed."""
        with self._lock:
            return self._alarm(reason)

    def _alarm(self, reason: str) -> PublicationLate:
        # Never 0, which stands for "no alarm yet".
        self._reported_at_age = max(self._unpublished(), 1e-9)
        age = self._clock() - self._published_at
        return PublicationLate(self._step, age, max(self._begun, default=None), len(self._superseded), reason)
