"""What the start of a training is at, and how long each of its phases takes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_STEP = "computing the first step"
COMPILING = "compiling the layers"
# Of /proc/PID/stat, behind the command's name: when the process began, in ticks after the machine did (proc(5)).
_BEGAN_FIELD = 19


class StartPhases:
    """Phases follow each other, from the beginning of the process until the first step has ended."""

    def __init__(self, clock: Callable[[], float] = time.time, began: float | None = None) -> None:
        """``clock`` in seconds since the epoch; ``began`` is when this process began, by default."""
        self._clock = clock
        self.began = process_began(clock()) if began is None else began
        self.doing = "starting"
        """The phase, for people."""
        self._since = self.began
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self.began

    def enter(self, doing: str) -> None:
        """The phase before ends, and ``doing`` begins; one may be entered again."""
        now = self._clock()
        self._seconds[self.doing] = self._seconds.get(self.doing, 0.0) + now - self._since
        self.doing, self._since = doing, now

    def ended(self, compiled: float | None) -> dict[str, float]:
        """Seconds of every phase, the present one included, of which ``compiled`` were spent on compilation."""
        self.enter(self.doing)
        found = dict(self._seconds)
        if compiled and FIRST_STEP in found:
            # Layers are compiled when they are first called.
            step = found.pop(FIRST_STEP)
            found |= {COMPILING: min(compiled, step), FIRST_STEP: max(0.0, step - compiled)}
        return found


def process_began(now: float) -> float:
    """When this process began, in seconds since the epoch; ``now`` where the kernel does not show it."""
    with suppress(OSError, ValueError, IndexError):
        # The name may hold spaces and parentheses.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        age = uptime - int(fields[_BEGAN_FIELD]) / os.sysconf("SC_CLK_TCK")
        if 0 <= age < uptime:  # some sandboxes show 0
            return now - age
    return now
