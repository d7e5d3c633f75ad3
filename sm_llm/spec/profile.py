"""When a training is profiled."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.base import SpecModel


class ProfileSpec(SpecModel):
    """Traces of torch's profiler, published in the run's folder as ``profiles/attempt-<n>/…json.gz``."""

    every_steps: int = Field(ge=1, le=10**12)
    """Take a trace every n steps."""
    steps: int = Field(default=1, ge=1, le=10_000)
    """Steps in one trace, from the n-th on; at most ``every_steps``."""
    all_processes: bool = False
    """Trace every process, not the first alone: large, and it slows all of them."""
