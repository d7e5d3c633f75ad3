"""Before many processes start: whether the image's compiled kernels can be loaded at all.

A kernel that was linked to another CUDA than the image's fails with a linker's error in the middle of a start, on every
process at once. Here it is reported in one line, by a process of its own that costs the job nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sm_llm.errors import RunFailed
from sm_llm.spec.tasks import TrainTask
from sm_llm.storage.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.worker.context import WorkerContext

KERNELS = ("flash_attn", "transformer_engine")
"""Modules whose import loads what was compiled for one CUDA and one torch."""
_SECONDS = 120.0
_PASSED = "kernels-that-load.json"


def probe_kernels(context: WorkerContext, kernels: tuple[str, ...] = KERNELS) -> Callable[[], None]:
    """Begin to load every installed kernel once on this node, in processes beside this one.

    What this returns waits for them, and raises ``RunFailed`` where our training needs one that does not load;
    elsewhere a program may do without, and is only warned. A start after one that found no fault probes nothing.
    """
    if context.process.world_size == 1 or not context.process.is_node_leader:
        return lambda: None
    passed = context.scratch / _PASSED
    installed = {name: stamp for name in kernels if (stamp := _stamp(name)) is not None}
    if not installed or _read(passed) == installed:
        return lambda: None
    pool = ThreadPoolExecutor(len(installed), thread_name_prefix="kernels")
    reasons = {name: pool.submit(reason_not_to_load, name) for name in installed}
    pool.shutdown(wait=False)

    def settle() -> None:
        problems = {name: reason for name, it in reasons.items() if (reason := it.result()) is not None}
        for name, reason in problems.items():
            _report(context, name, reason)
        if not problems:
            with suppress(OSError):
                write_atomically(passed, json.dumps(installed).encode())

    return settle


def _report(context: WorkerContext, name: str, reason: str) -> None:
    task = context.job.spec.task
    words = f"{name} is in this image but cannot be loaded: {reason}"
    remedy = "It was built for another CUDA or torch: take it out of the image, or build it for this one"
    if isinstance(task, TrainTask) and task.parallelism.can.needs_kernels:
        raise RunFailed(f"{words}. {remedy}")
    context.notice(f"{words}. {remedy}", "warning")


def _stamp(name: str) -> list[str | int] | None:
    """File of an installed module and when it was written, with torch's; None for one that is not installed."""
    if find_spec(name) is None:
        return None
    found = [it.origin for module in (name, "torch") if (it := find_spec(module)) is not None and it.origin]
    return [part for file in found for part in (file, os.stat(file).st_mtime_ns)]


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
