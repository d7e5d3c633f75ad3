"""The hardware: what accelerators can do at best (the denominator of MFU), and one row per instance type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Accelerator:
    """One accelerator model. ``name`` is a part of the device name that its driver reports."""

    name: str
    bf16_flops: float
    """Peak dense bf16 FLOP/s of one device, without structured sparsity."""
    source: str


@dataclass(frozen=True)
class Card:
    """One accelerator of a job, as far as the estimate of memory and the checks of number formats ask."""

    name: str
    gib: float
    """Memory, as its driver shows it."""
    is_neuron: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.gib:.4g} GiB)"

    @property
    def has_bf16(self) -> bool:
        """Whether it computes bf16 natively: NVIDIA's GPUs since Ampere, and NeuronCores."""
        return not any(name in self.name for name in _BEFORE_AMPERE)

    @property
    def has_fp8(self) -> bool:
        """Whether it multiplies matrices in fp8: of NVIDIA's GPUs those since Ada and Hopper."""
        return not any(name in self.name for name in _BEFORE_ADA)


@dataclass(frozen=True)
class Instance:
    """One instance type of SageMaker. Trainium counts NeuronCores as the runtime shows them (Trn2: logical ones)."""

    name: str
    accelerator: str | None
    """A name of ``ACCELERATORS``, or V100 or T4, which have no bf16; None for CPU types."""
    accelerators: int
    accelerator_gib: float
    """Memory of one accelerator."""
    vcpus: int
    memory_gib: int
    network_gbps: float
    efa_cards: int
    """Network cards with an Elastic Fabric Adapter; 0 where there is none."""
    nvme_gb: int
    """Local NVMe disks together; 0 means that the job's own EBS volume is all there is."""

    @property
    def processes(self) -> int:
        """Processes a node runs: one per accelerator, or one."""
        return max(1, self.accelerators)

    @property
    def family(self) -> str:
        """``p4d`` of ``ml.p4d.24xlarge``."""
        return self.name.split(".")[1]

    @property
    def is_neuron(self) -> bool:
        return self.family.startswith("trn")

    @property
    def is_gpu(self) -> bool:
        return self.accelerator is not None and not self.is_neuron

    @property
    def card(self) -> Card | None:
        """One of its accelerators; None where there is none."""
        return Card(self.accelerator, self.accelerator_gib, self.is_neuron) if self.accelerator else None


ACCELERATORS: tuple[Accelerator, ...] = (
    Accelerator("H100 NVL", 835e12, "NVIDIA H100 NVL product brief (1,671 TFLOP/s with sparsity)"),
    Accelerator("H100 PCIe", 756e12, "NVIDIA H100 PCIe datasheet (1,513 TFLOP/s with sparsity)"),
    Accelerator("H100", 989e12, "NVIDIA H100 SXM datasheet (1,979 TFLOP/s with sparsity)"),
    Accelerator("H200", 989e12, "NVIDIA H200 SXM datasheet (1,979 TFLOP/s with sparsity)"),
    Accelerator("B200", 2250e12, "NVIDIA HGX B200 datasheet (4.5 PFLOP/s with sparsity)"),
    Accelerator("B300", 2250e12, "NVIDIA HGX B300 datasheet (4.5 PFLOP/s with sparsity)"),
    Accelerator("A100", 312e12, "NVIDIA A100 datasheet"),
    Accelerator("A10G", 70e12, "NVIDIA A10G datasheet (140 TFLOP/s with sparsity)"),
    Accelerator("L40S", 362e12, "NVIDIA L40S datasheet (733 TFLOP/s with sparsity)"),
    Accelerator("L4", 121e12, "NVIDIA L4 datasheet (242 TFLOP/s with sparsity)"),
    Accelerator("Trainium2", 166.75e12, "AWS Trn2: 667 TFLOP/s a chip of 4 logical cores"),
    Accelerator("Trainium", 95e12, "AWS Trn1: 190 TFLOP/s a chip of 2 cores"),
)
"""Names that contain another come before it."""

INSTANCES: tuple[Instance, ...] = (
    Instance("ml.p3.2xlarge", "V100", 1, 16, 8, 61, 10, 0, 0),
    Instance("ml.p3.8xlarge", "V100", 4, 16, 32, 244, 10, 0, 0),
    Instance("ml.p3.16xlarge", "V100", 8, 16, 64, 488, 25, 0, 0),
    Instance("ml.p3dn.24xlarge", "V100", 8, 32, 96, 768, 100, 1, 1800),
    Instance("ml.p4d.24xlarge", "A100", 8, 40, 96, 1152, 400, 4, 8000),
    Instance("ml.p4de.24xlarge", "A100", 8, 80, 96, 1152, 400, 4, 8000),
    Instance("ml.p5.4xlarge", "H100", 1, 80, 16, 256, 100, 1, 3800),
    Instance("ml.p5.48xlarge", "H100", 8, 80, 192, 2048, 3200, 32, 30400),
    Instance("ml.p5e.48xlarge", "H200", 8, 141, 192, 2048, 3200, 32, 30400),
    Instance("ml.p5en.48xlarge", "H200", 8, 141, 192, 2048, 3200, 16, 30400),
    Instance("ml.p6-b200.48xlarge", "B200", 8, 179.1, 192, 2048, 3200, 8, 30400),
    Instance("ml.p6-b300.48xlarge", "B300", 8, 268.6, 192, 4096, 6400, 16, 30400),
    Instance("ml.g4dn.xlarge", "T4", 1, 16, 4, 16, 5, 0, 125),
    Instance("ml.g4dn.2xlarge", "T4", 1, 16, 8, 32, 10, 0, 225),
    Instance("ml.g4dn.4xlarge", "T4", 1, 16, 16, 64, 20, 0, 225),
    Instance("ml.g4dn.8xlarge", "T4", 1, 16, 32, 128, 50, 1, 900),
    Instance("ml.g4dn.12xlarge", "T4", 4, 16, 48, 192, 50, 1, 900),
    Instance("ml.g4dn.16xlarge", "T4", 1, 16, 64, 256, 50, 1, 900),
    Instance("ml.g5.xlarge", "A10G", 1, 22.4, 4, 16, 2.5, 0, 250),
    Instance("ml.g5.2xlarge", "A10G", 1, 22.4, 8, 32, 5, 0, 450),
    Instance("ml.g5.4xlarge", "A10G", 1, 22.4, 16, 64, 10, 0, 600),
    Instance("ml.g5.8xlarge", "A10G", 1, 22.4, 32, 128, 25, 1, 900),
    Instance("ml.g5.12xlarge", "A10G", 4, 22.4, 48, 192, 40, 1, 3800),
    Instance("ml.g5.16xlarge", "A10G", 1, 22.4, 64, 256, 25, 1, 1900),
    Instance("ml.g5.24xlarge", "A10G", 4, 22.4, 96, 384, 50, 1, 3800),
    Instance("ml.g5.48xlarge", "A10G", 8, 22.4, 192, 768, 100, 1, 7600),
    Instance("ml.g6.xlarge", "L4", 1, 22.4, 4, 16, 2.5, 0, 250),
    Instance("ml.g6.2xlarge", "L4", 1, 22.4, 8, 32, 5, 0, 450),
    Instance("ml.g6.4xlarge", "L4", 1, 22.4, 16, 64, 10, 0, 600),
    Instance("ml.g6.8xlarge", "L4", 1, 22.4, 32, 128, 25, 1, 900),
    Instance("ml.g6.12xlarge", "L4", 4, 22.4, 48, 192, 40, 1, 3760),
    Instance("ml.g6.16xlarge", "L4", 1, 22.4, 64, 256, 25, 1, 1880),
    Instance("ml.g6.24xlarge", "L4", 4, 22.4, 96, 384, 50, 1, 3760),
    Instance("ml.g6.48xlarge", "L4", 8, 22.4, 192, 768, 100, 1, 7520),
    Instance("ml.g6e.xlarge", "L40S", 1, 44.7, 4, 32, 2.5, 0, 250),
    Instance("ml.g6e.2xlarge", "L40S", 1, 44.7, 8, 64, 5, 0, 450),
    Instance("ml.g6e.4xlarge", "L40S", 1, 44.7, 16, 128, 20, 0, 600),
    Instance("ml.g6e.8xlarge", "L40S", 1, 44.7, 32, 256, 25, 1, 900),
    Instance("ml.g6e.12xlarge", "L40S", 4, 44.7, 48, 384, 100, 1, 3800),
    Instance("ml.g6e.16xlarge", "L40S", 1, 44.7, 64, 512, 35, 1, 1900),
    Instance("ml.g6e.24xlarge", "L40S", 4, 44.7, 96, 768, 200, 2, 3800),
    Instance("ml.g6e.48xlarge", "L40S", 8, 44.7, 192, 1536, 400, 4, 7600),
    Instance("ml.g7e.2xlarge", "RTX PRO 6000", 1, 96, 8, 64, 50, 0, 1900),
    Instance("ml.g7e.4xlarge", "RTX PRO 6000", 1, 96, 16, 128, 50, 0, 1900),
    Instance("ml.g7e.8xlarge", "RTX PRO 6000", 1, 96, 32, 256, 100, 1, 1900),
    Instance("ml.g7e.12xlarge", "RTX PRO 6000", 2, 96, 48, 512, 400, 1, 3800),
    Instance("ml.g7e.24xlarge", "RTX PRO 6000", 4, 96, 96, 1024, 800, 2, 7600),
    Instance("ml.g7e.48xlarge", "RTX PRO 6000", 8, 96, 192, 2048, 1600, 4, 15200),
    Instance("ml.trn1.2xlarge", "Trainium", 2, 16, 8, 32, 3.125, 0, 474),
    Instance("ml.trn1.32xlarge", "Trainium", 32, 16, 128, 512, 800, 8, 7600),
    Instance("ml.trn1n.32xlarge", "Trainium", 32, 16, 128, 512, 1600, 16, 7600),
    Instance("ml.trn2.48xlarge", "Trainium2", 64, 24, 192, 2048, 3200, 16, 7600),
    Instance("ml.c5.xlarge", None, 0, 0, 4, 8, 1.25, 0, 0),
    Instance("ml.c5.2xlarge", None, 0, 0, 8, 16, 2.5, 0, 0),
    Instance("ml.c5.4xlarge", None, 0, 0, 16, 32, 5, 0, 0),
    Instance("ml.c5.9xlarge", None, 0, 0, 36, 72, 12, 0, 0),
    Instance("ml.c5.18xlarge", None, 0, 0, 72, 144, 25, 0, 0),
    Instance("ml.c5n.xlarge", None, 0, 0, 4, 10, 5, 0, 0),
    Instance("ml.c5n.2xlarge", None, 0, 0, 8, 21, 10, 0, 0),
    Instance("ml.c5n.4xlarge", None, 0, 0, 16, 42, 15, 0, 0),
    Instance("ml.c5n.9xlarge", None, 0, 0, 36, 96, 50, 1, 0),
    Instance("ml.c5n.18xlarge", None, 0, 0, 72, 192, 100, 1, 0),
    Instance("ml.m5.large", None, 0, 0, 2, 8, 0.75, 0, 0),
    Instance("ml.m5.xlarge", None, 0, 0, 4, 16, 1.25, 0, 0),
    Instance("ml.m5.2xlarge", None, 0, 0, 8, 32, 2.5, 0, 0),
    Instance("ml.m5.4xlarge", None, 0, 0, 16, 64, 5, 0, 0),
    Instance("ml.m5.12xlarge", None, 0, 0, 48, 192, 12, 0, 0),
    Instance("ml.m5.24xlarge", None, 0, 0, 96, 384, 25, 0, 0),
    Instance("ml.r5.large", None, 0, 0, 2, 16, 0.75, 0, 0),
    Instance("ml.r5.xlarge", None, 0, 0, 4, 32, 1.25, 0, 0),
    Instance("ml.r5.2xlarge", None, 0, 0, 8, 64, 2.5, 0, 0),
    Instance("ml.r5.4xlarge", None, 0, 0, 16, 128, 5, 0, 0),
    Instance("ml.r5.8xlarge", None, 0, 0, 32, 256, 10, 0, 0),
    Instance("ml.r5.12xlarge", None, 0, 0, 48, 384, 12, 0, 0),
    Instance("ml.r5.16xlarge", None, 0, 0, 64, 512, 20, 0, 0),
    Instance("ml.r5.24xlarge", None, 0, 0, 96, 768, 25, 0, 0),
    Instance("ml.m7i.large", None, 0, 0, 2, 8, 0.781, 0, 0),
    Instance("ml.m7i.xlarge", None, 0, 0, 4, 16, 1.562, 0, 0),
    Instance("ml.m7i.2xlarge", None, 0, 0, 8, 32, 3.125, 0, 0),
    Instance("ml.m7i.4xlarge", None, 0, 0, 16, 64, 6.25, 0, 0),
    Instance("ml.m7i.8xlarge", None, 0, 0, 32, 128, 12.5, 0, 0),
    Instance("ml.m7i.12xlarge", None, 0, 0, 48, 192, 18.75, 0, 0),
    Instance("ml.m7i.16xlarge", None, 0, 0, 64, 256, 25, 0, 0),
    Instance("ml.m7i.24xlarge", None, 0, 0, 96, 384, 37.5, 0, 0),
    Instance("ml.m7i.48xlarge", None, 0, 0, 192, 768, 50, 1, 0),
    Instance("ml.c7i.xlarge", None, 0, 0, 4, 8, 1.562, 0, 0),
    Instance("ml.c7i.2xlarge", None, 0, 0, 8, 16, 3.125, 0, 0),
    Instance("ml.c7i.4xlarge", None, 0, 0, 16, 32, 6.25, 0, 0),
    Instance("ml.c7i.8xlarge", None, 0, 0, 32, 64, 12.5, 0, 0),
    Instance("ml.c7i.12xlarge", None, 0, 0, 48, 96, 18.75, 0, 0),
    Instance("ml.c7i.16xlarge", None, 0, 0, 64, 128, 25, 0, 0),
    Instance("ml.c7i.24xlarge", None, 0, 0, 96, 192, 37.5, 0, 0),
    Instance("ml.c7i.48xlarge", None, 0, 0, 192, 384, 50, 1, 0),
)
"""Columns: type, accelerator, count, GiB each, vCPU, GiB, network Gb/s, EFA cards, NVMe GB.

Source: what EC2's DescribeInstanceTypes returns, as tabulated by Karpenter's reference page of instance types; P3 from
EC2's P3 page; NeuronCores from the Neuron documentation (Trn2 at its default of 64 logical cores).
"""

CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
"""Back ends of torch's attention, as ``torch.nn.attention.SDPBackend`` names them."""
FLEX, RING = "flex", "ring"
"""FlexAttention over the blocks of a window; PyTorch's context parallelism, with flash attention inside."""
# For data centres: torch takes cuDNN's kernels first on these alone, and on others flash attention is as fast.
_SINCE_HOPPER = ("H100", "H200", "B200", "B300")
# Compute capabilities below 8.0, without bf16 and flash attention, and below 8.9, without fp8.
_BEFORE_AMPERE = ("V100", "T4")
_BEFORE_ADA = (*_BEFORE_AMPERE, "A100", "A10G")
_CUDNN_CHANNELS, _FLASH_CHANNELS = 128, 256
_BY_NAME = {row.name: row for row in INSTANCES}
# Names at least this similar (``SequenceMatcher.ratio``) may be one name with a typing error.
_MISSPELT = 0.8


def instance(name: str | None) -> Instance | None:
    """The row of an instance type such as ``ml.p5.48xlarge``, or None for one that is not in the table."""
    return _BY_NAME.get(name or "")


def nearest_instance(name: str) -> Instance | None:
    """The row that a name which is in no row was probably meant to name."""
    name = name.lower()
    # Only one: a list of similar types would be long, for families differ by a letter.
    close = get_close_matches(name, _BY_NAME, n=1, cutoff=_MISSPELT)
    # EC2's own names of the types lack the prefix.
    return _BY_NAME.get(f"ml.{name}") or (_BY_NAME[close[0]] if close else None)


def instance_bf16_flops(row: Instance) -> float | None:
    """Peak dense bf16 FLOP/s of one accelerator of an instance, or None where it has none."""
    return next((it.bf16_flops for it in ACCELERATORS if it.name == row.accelerator), None)


def attention_kernel(
    device_name: str,
    compute: str,
    head_size: int,
    *,
    in_window: bool = False,
    is_shared: bool = False,
    drops: bool = False,
) -> str:
    """What should compute attention on an NVIDIA GPU: ``flex``, ``ring`` or the fastest of torch's own back ends.

    ``head_size`` in channels; ``in_window``: a token sees a part of its sequence alone; ``is_shared``: processes share
    the sequence; ``drops``: with dropout.
    """
    if in_window and not is_shared and not drops:
        return FLEX
    if is_shared and not in_window:
        return RING
    # Any other window is a mask.
    if in_window or compute == "fp32" or any(name in device_name for name in _BEFORE_AMPERE):
        return EFFICIENT
    if any(name in device_name for name in _SINCE_HOPPER) and head_size <= _CUDNN_CHANNELS and head_size % 8 == 0:
        return CUDNN
    return FLASH if head_size <= _FLASH_CHANNELS else EFFICIENT


def joined_by_nvlink(device_name: str) -> bool:
    """Whether hosts with such NVIDIA GPUs join all of them by NVSwitch: the SXM boards since Hopper."""
    return any(it in device_name for it in _SINCE_HOPPER) and not any(it in device_name for it in ("PCIe", "NVL"))


def accelerator(device_name: str) -> Accelerator | None:
    """The row of a device name such as ``NVIDIA H100 80GB HBM3``, or None for one without a known peak."""
    # Drivers add vendor and memory to the name, as in NVIDIA H100 80GB HBM3. A digit makes it another one: an L40 is no
    # L4. Other letters before it do not: the GPU of a GH200 is an H200's.
    return next((row for row in ACCELERATORS if re.search(rf"{row.name}(?!\d)", device_name)), None)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device by its name, or None if it is not known (then there is no MFU)."""
    row = accelerator(device_name)
    return row.bf16_flops if row else None
