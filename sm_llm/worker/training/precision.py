"""Settles the number format of the forward and backward pass by what the hardware computes natively."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import Device


def settled(task: TrainTask, device: Device) -> TrainTask:
    """``task`` with ``precision.compute: auto`` replaced: bf16 where it is native (or the masters are), else fp32.

    Where bf16 is emulated it is many times slower than fp32: forty times on an x86 CPU without AVX-512.
    """
    precision = task.precision
    if precision.compute != "auto":
        return task
    native = precision.master == "bf16" or device.computes_bf16()
    settled_precision = precision.model_copy(update={"compute": "bf16" if native else "fp32"})
    return task.model_copy(update={"precision": settled_precision})
