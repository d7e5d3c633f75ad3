"""Settles the number format of the forward and backward pass by what the hardware computes natively."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sm_llm.spec.tasks import TrainTask

BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
"""What /proc/cpuinfo calls bf16 instructions on x86 (the first two) and on Arm."""
FIRST_BF16_CAPABILITY = (8, 0)
"""NVIDIA's Ampere, the first with bf16 tensor cores (CUDA C++ programming guide, compute capabilities)."""


def settled(task: TrainTask, cpu_info: Path = Path("/proc/cpuinfo")) -> TrainTask:
    """``task`` with ``precision.compute: auto`` replaced: bf16 where it is native (or the masters are), else fp32.

    Where bf16 is emulated it is many times slower than fp32: forty times on an x86 CPU without AVX-512.
    """
    precision = task.precision
    if precision.compute != "auto":
        return task
    native = precision.master == "bf16" or _computes_bf16(cpu_info)
    settled_precision = precision.model_copy(update={"compute": "bf16" if native else "fp32"})
    return task.model_copy(update={"precision": settled_precision})


def _computes_bf16(cpu_info: Path) -> bool:
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= FIRST_BF16_CAPABILITY
    try:
        words = cpu_info.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False
    return not BF16_FLAGS.isdisjoint(words)
