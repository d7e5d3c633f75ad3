"""Breaks a job down on purpose, as a power cut would: for proofs that it then continues exactly."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import BREAK_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Mapping


def fault_step(attempt: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """The step before which this attempt is to break down: attempt n's is the n-th of the variable's list."""
    steps = [int(part) for part in environ.get(BREAK_ENVIRONMENT, "").split(",") if part]
    return steps[attempt - 1] if attempt <= len(steps) else None


def inject_fault() -> None:
    """SIGKILL to this process: nothing is tidied up."""
    os.kill(os.getpid(), signal.SIGKILL)
