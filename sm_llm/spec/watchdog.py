"""When a job that does not get on is ended."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.base import SpecModel


class WatchdogSpec(SpecModel):
    """A stalled job logs where all its processes are, and ends."""

    enabled: bool = True
    """Off: a stalled job runs on, e.g. under a debugger."""
    stall_factor: float = Field(default=20.0, ge=2, le=1e6)
    """No step for this many times the median step time is a stall ..."""
    stall_seconds: float = Field(default=120.0, gt=0, le=2_419_200)
    """... but never sooner than this; also how long a process may give no sign of life at all."""
    start_seconds: float = Field(default=1800.0, gt=0, le=2_419_200)
    """How long the first steps may take, before their usual time is known."""
