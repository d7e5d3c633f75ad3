"""What the strategies share on a process's device: which one it is, number formats, determinism."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sm_llm.worker.context import Place

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def own_device(place: Place) -> torch.device:
    """The GPU of this process, made the current one; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def ask_for_determinism() -> None:
    """Deterministic kernels everywhere; cuBLAS needs its workspace fixed before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
