"""What the strategies share on a process's device: which one it is, number formats, determinism."""

from __future__ import annotations

import ctypes
import os
import platform
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sm_llm.worker.place import Place

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGE_BYTES = 1 << 30, 32 << 20
"""See mallopt(3): free memory that stays with the process, and blocks that always go back (32 MiB is its limit)."""


def own_device(place: Place) -> torch.device:
    """The GPU of this process, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def keep_freed_memory() -> None:
    """Let tensors of the next step take over the memory of this one's, with glibc.

    By default it gives them back, and the kernel clears each page again (docs/benchmarks.md, The training loop).
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def ask_for_determinism() -> None:
    """Deterministic kernels everywhere; cuBLAS needs its workspace fixed before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
