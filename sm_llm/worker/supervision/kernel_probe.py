"""Before many processes start: whether the image's compiled kernels can be loaded at all.

A kernel that was linked to another CUDA than the image's fails with a linker's error in the middle of a start, on every
process at once. Here it is reported in one line, by a process of its own that costs the job nothing.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sm_llm.errors import RunFailed
from sm_llm.spec.tasks import TrainTask

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.worker.context import WorkerContext

KERNELS = ("flash_attn", "transformer_engine")
"""Modules whose import loads what was compiled for one CUDA and one torch."""
_SECONDS = 120.0


def probe_kernels(context: WorkerContext, kernels: tuple[str, ...] = KERNELS) -> None:
    """Load every installed kernel once on this node.

    Raises ``RunFailed`` where our training needs it; elsewhere a program may do without, and is only warned.
    """
    if context.process.world_size == 1 or not context.process.is_node_leader:
        return
    task = context.job.spec.task
    for name in kernels:
        reason = reason_not_to_load(name)
        if reason is None:
            continue
        words = f"{name} is in this image but cannot be loaded: {reason}"
        remedy = "It was built for another CUDA or torch: take it out of the image, or build it for this one"
        if isinstance(task, TrainTask) and task.parallelism.can.needs_kernels:
            raise RunFailed(f"{words}. {remedy}")
        context.notice(f"{words}. {remedy}", "warning")


def reason_not_to_load(name: str, run: Callable[..., Any] = subprocess.run) -> str | None:
    """The last line that the import of a module prints; None if it is loaded or not installed."""
    if find_spec(name) is None:
        return None
    try:
        # In another process: a kernel that does not fit can end the one that loads it.
        command = [sys.executable, "-P", "-c", f"import {name}"]
        done = run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"its import takes more than {_SECONDS:.0f} s"
    lines = done.stderr.strip().splitlines()
    # A linker's error is the last line of a traceback.
    return None if done.returncode == 0 else (lines or [f"exit code {done.returncode}"])[-1]
