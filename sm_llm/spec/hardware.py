"""What accelerators can do at best: the denominator of MFU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One accelerator model. ``name`` is a part of the device name that its driver reports."""

    name: str
    bf16_flops: float
    """Peak dense bf16 FLOP/s of one device, without structured sparsity."""
    source: str


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("H100 NVL", 835e12, "NVIDIA H100 NVL product brief (1,671 TFLOP/s with sparsity)"),
    Accelerator("H100 PCIe", 756e12, "NVIDIA H100 PCIe datasheet (1,513 TFLOP/s with sparsity)"),
    Accelerator("H100", 989e12, "NVIDIA H100 SXM datasheet (1,979 TFLOP/s with sparsity)"),
    Accelerator("H200", 989e12, "NVIDIA H200 SXM datasheet (1,979 TFLOP/s with sparsity)"),
    Accelerator("B200", 2250e12, "NVIDIA HGX B200 datasheet (4.5 PFLOP/s with sparsity)"),
    Accelerator("A100", 312e12, "NVIDIA A100 datasheet"),
    Accelerator("A10G", 70e12, "NVIDIA A10G datasheet (140 TFLOP/s with sparsity)"),
    Accelerator("L40S", 362e12, "NVIDIA L40S datasheet (733 TFLOP/s with sparsity)"),
    Accelerator("L4", 121e12, "NVIDIA L4 datasheet (242 TFLOP/s with sparsity)"),
)
"""Names that contain another come before it."""


def accelerator(device_name: str) -> Accelerator | None:
    """The row of a device name such as ``NVIDIA H100 80GB HBM3``, or None for one without a known peak."""
    return next((row for row in ACCELERATORS if row.name in device_name), None)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device by its name, or None if it is not known (then there is no MFU)."""
    row = accelerator(device_name)
    return row.bf16_flops if row else None
