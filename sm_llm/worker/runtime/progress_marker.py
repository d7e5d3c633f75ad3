"""How far the main thread of a process has come: written by it, read by the watchdog's thread."""

from __future__ import annotations

import statistics
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEPT = 101
_ENOUGH = 3


class ProgressMarker:
    """Steps done, their durations, and what is being done now. Noting a step costs a clock and a few assignments."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = 0
        self.phase = "start"
        self._clock = clock
        self._stepping = False
        self._warm = False
        self._mark = clock()
        self._durations: deque[float] = deque(maxlen=_KEPT)

    def begin(self, step: int) -> None:
        """Steps follow, after ``step`` that are done."""
        # ``_stepping`` last: the time before must not count as that of a step.
        self.step, self._warm, self._mark = step, False, self._clock()
        self._stepping = True

    def done(self, step: int) -> None:
        """One more step is done. The first of an attempt does not count: it compiles and warms up."""
        now = self._clock()
        if self._warm:
            self._durations.append(now - self._mark)
        self.step, self._mark, self._warm = step, now, True

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Something other than steps: it has no usual duration, and its time is not the next step's."""
        outside, self.phase, was_stepping = self.phase, phase, self._stepping
        # From here on the watchdog takes a long silence for normal.
        self._stepping = False
        try:
            yield
        finally:
            # The mark first, then ``_stepping``: the time of the phase must not count as that of a step.
            self.phase, self._mark = outside, self._clock()
            self._stepping = was_stepping

    @property
    def has_stepped(self) -> bool:
        """Whether a step of this attempt is done."""
        return self._warm

    @property
    def median_seconds(self) -> float | None:
        """The median duration of the last steps; None before there are enough."""
        durations = list(self._durations)
        return statistics.median(durations) if len(durations) >= _ENOUGH else None

    def seconds_without_step(self) -> float | None:
        """Since the last step ended; None while something else than steps is being done."""
        # The writer sets the mark before ``_stepping``, so they are read the other way round. The clock comes first:
        # this thread may be held up between any two reads, and that time is nobody's step.
        now = self._clock()
        return max(0.0, now - self._mark) if self._stepping else None
