"""torchrun that imports torch once for a node: its processes are forked from it, with torch and our code loaded.

``python -P -m sm_llm.worker.node_setup.forking_torchrun ARGUMENTS`` of torchrun. Processes that it starts as programs
import torch once more each, after torchrun itself has: seconds of every start, more from a shared file system.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.worker.runtime.imports import without_collections

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Of trainings: those of other tasks' processes differ from rank to rank, or need no torch.
_MODULES = ("sm_llm.worker.main", "sm_llm.worker.tasks.train")
_FORKED = ("--start-method=fork", "--run-path")
# CUDA_ERROR_NOT_INITIALIZED of cuda.h.
_NOT_INITIALISED = 3


def main(arguments: Sequence[str]) -> None:
    """Run torchrun with ``arguments``; its processes are programs of their own where they cannot be forked."""
    with without_collections():
        is_loaded = _load()
        torchrun = import_module("torch.distributed.run")
    # Asked last: any import before may have done what forbids a fork.
    torchrun.main([*(_FORKED if is_loaded and can_fork() else ()), *arguments])


def _load() -> bool:
    """Import what every process of the job imports; False where they must do it themselves."""
    try:
        if not _may_share(os.environ):
            return False
        for name in _MODULES:
            import_module(name)
    except ImportError:
        # The entrypoint installs what the image lacks, or reports what cannot be imported.
        return False
    return True


def _may_share(environ: Mapping[str, str]) -> bool:
    """Whether the job is a training whose strategy takes it. Raises ``ImportError``."""
    from sm_llm.contract.job_file import JOB_ENVIRONMENT, JobFile
    from sm_llm.errors import SmLlmError
    from sm_llm.spec.tasks import TrainTask

    try:
        task = JobFile.read(Path(environ[JOB_ENVIRONMENT])).spec.task
    except (KeyError, OSError, ValueError, SmLlmError):  # the processes report it
        return False
    return isinstance(task, TrainTask) and task.parallelism.can.forks


def can_fork(find_library: Callable[..., Any] = ctypes.CDLL) -> bool:
    """Whether a fork of this process can use GPUs, and has no lock that a thread of this process held."""
    if threading.active_count() > 1:
        return False
    try:
        # RTLD_NOLOAD: only what an import has loaded already.
        driver = find_library("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return True
    # CUDA that was initialised before a fork never works behind it; this call does not initialise it.
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == _NOT_INITIALISED


if __name__ == "__main__":
    main(sys.argv[1:])
