"""The devices that processes compute on, behind one interface; and what the strategies share there."""

from __future__ import annotations

import ctypes
import os
import platform
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch.profiler import ProfilerActivity

from sm_llm.spec.machines.hardware import joined_by_nvlink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from sm_llm.worker.process_info import ProcessInfo

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.bfloat16}
"""``precision.compute`` -> format of activations and gathered weights; fp8 is inside matrix products alone."""
LAG_STEPS = 8
"""How many steps late a number is read from a GPU: by then it has long passed them, and nobody waits."""

# What /proc/cpuinfo calls bf16 instructions on x86 (the first two) and on Arm.
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
# NVIDIA's Ampere, the first with bf16 tensor cores (CUDA C++ programming guide, compute capabilities).
_FIRST_BF16_CAPABILITY = (8, 0)
# NVIDIA's Ada, the first with fp8 tensor cores.
_FIRST_FP8_CAPABILITY = (8, 9)
_ALLOCATOR_VARIABLES = frozenset({"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"})
_PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES, _LARGE_BYTES = 1 << 30, 32 << 20
"""See mallopt(3): free memory that stays with the process, and blocks that always go back (32 MiB is its limit)."""


class Device(Protocol):
    """What the loop asks of a device. No method makes the host wait for it, but those that are described as waiting."""

    torch_device: torch.device
    """Where parameters and activations are."""
    counts: torch.device
    """Where counts and losses are added up over processes: a device whose collectives the default group has."""
    lag_steps: int
    """How many steps late ``read_later`` can be read without waiting."""
    name: str
    """As its maker calls it; ``cpu``."""

    @property
    def type(self) -> str:
        """torch's name of the kind: ``cpu``, ``cuda``. Checkpoints keep the random state under it."""

    def computes_bf16(self) -> bool:
        """Whether the hardware computes bf16 natively."""

    def computes_fp8(self) -> bool:
        """Whether the hardware multiplies matrices in fp8."""

    def copy_obstacle(self, devices: int, *, is_asked_for: bool) -> str:
        """Why the device should not copy from the memory of the other ``devices`` of its node; "" if it should.

        Without ``is_asked_for`` only devices should that are known to be joined by NVLink: over PCIe a GPU may wait for
        another one's atomic writes for ever.
        """

    def send(self, values: np.ndarray) -> torch.Tensor:
        """An array of the host on the device."""

    def scalars(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scalars of the device, one after the other, as fp64 [n] on ``counts``."""

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        """Begin to copy an fp32 scalar to the host. What is returned waits for the copy and gives the number."""

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the host for a copy of ``tensor``. Threads may call it."""

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Begin to copy tensors, each behind its buffer of the host. What is returned waits for all of them; until
        ``after_copies`` nothing may be asked for that changes the tensors."""

    def after_copies(self) -> None:
        """Let what is asked for from now on come after the copies that have begun."""

    def wait(self) -> None:
        """Wait for all that this thread has asked of the device."""

    @property
    def total_memory(self) -> int | None:
        """Bytes of its memory, free or not; None where the device has no memory of its own."""

    def peak_memory(self) -> int | None:
        """Peak bytes allocated since the last call; None where the device has no memory of its own."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators, the host's among them."""

    def random_state(self) -> torch.Tensor | None:
        """State (uint8 [n]) of the device's own generator; None if the host's is all there is."""

    def restore_random(self, state: torch.Tensor) -> None:
        """Continue the device's own generator from ``random_state``."""

    def profiled(self) -> list[ProfilerActivity]:
        """What torch's profiler records here."""


class HostGenerator:
    """A device on which nothing is drawn, for ``Device``: torch's generator of the host is all there is."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def random_state(self) -> None:
        """None: the device has no generator."""

    def restore_random(self, state: torch.Tensor) -> None:
        raise AssertionError("the device has no generator of its own")

    def profiled(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU]


class CpuDevice(HostGenerator):
    """The CPU (``Device``). It computes at once, so nothing is read late."""

    lag_steps = 0
    name = type = "cpu"

    def __init__(self, cpu_info: Path = Path("/proc/cpuinfo")) -> None:
        self.torch_device = self.counts = torch.device("cpu")
        self._cpu_info = cpu_info

    def computes_bf16(self) -> bool:
        try:
            words = self._cpu_info.read_text(encoding="utf-8", errors="replace").split()
        except OSError:
            return False
        return not _BF16_FLAGS.isdisjoint(words)

    def computes_fp8(self) -> bool:
        return False

    def copy_obstacle(self, devices: int, *, is_asked_for: bool) -> str:
        return "there is no GPU"

    def send(self, values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values)

    def scalars(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return _stacked(values)

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        return value.item

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu")

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        for buffer, tensor in pairs:
            buffer.copy_(tensor)
        return self.wait

    def after_copies(self) -> None:
        """Copies are complete when they have begun."""

    def wait(self) -> None:
        """Nothing is pending."""

    @property
    def total_memory(self) -> None:
        """None: no settings are chosen by the host's memory."""
        return None

    def peak_memory(self) -> None:
        """None: the host's memory is reported apart."""


class CudaDevice:
    """One GPU (``Device``), made the process's current one."""

    type = "cuda"
    lag_steps = LAG_STEPS

    def __init__(self, index: int) -> None:
        self.torch_device = self.counts = torch.device("cuda", index)
        # NCCL and Triton's kernels take the current device, whichever a tensor is on.
        torch.cuda.set_device(self.torch_device)
        self.name = torch.cuda.get_device_name(self.torch_device)
        _pin_in_parallel()
        # Allocated ahead, because pinning memory waits for the device.
        self._slots = [_pinned_scalar() for _ in range(self.lag_steps + 1)]
        self._copies = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def computes_bf16(self) -> bool:
        return torch.cuda.get_device_capability(self.torch_device) >= _FIRST_BF16_CAPABILITY

    def computes_fp8(self) -> bool:
        return torch.cuda.get_device_capability(self.torch_device) >= _FIRST_FP8_CAPABILITY

    def copy_obstacle(self, devices: int, *, is_asked_for: bool) -> str:
        if not is_asked_for and not joined_by_nvlink(self.name):
            return f"{self.name} is not known to be joined by NVLink"
        if torch.cuda.device_count() < devices:
            return "not every process sees all GPUs of the node"
        own = self.torch_device.index
        for other in range(devices):
            if other != own and not torch.cuda.can_device_access_peer(self.torch_device, other):
                return f"GPU {own} cannot read the memory of GPU {other}"
        return ""

    def send(self, values: np.ndarray) -> torch.Tensor:
        # From memory that is not pinned, the host waits until the driver has copied it to its own buffer.
        return torch.as_tensor(values).pin_memory().to(self.torch_device, non_blocking=True)

    def scalars(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return _stacked(values)

    def read_later(self, value: torch.Tensor) -> Callable[[], float]:
        # A slot is free again only once it has been read, so no copy overwrites a number that is still wanted.
        slot = self._slots.pop() if self._slots else _pinned_scalar()
        slot.copy_(value, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def read() -> float:
            copied.synchronize()
            number = slot.item()
            self._slots.append(slot)
            return number

        return read

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned for a tensor of the GPU, so that copies need no staging by the driver."""
        with torch.cuda.device(self.torch_device):  # each thread has a current device of its own, the first
            return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

    def copy_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        # On a stream of its own: the next forward and backward pass only read what is copied, and run beside it.
        self._copies.wait_stream(torch.cuda.current_stream(self.torch_device))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            for buffer, tensor in pairs:
                buffer.copy_(tensor, non_blocking=True)
            copied.record()
        self._copied = copied
        return copied.synchronize

    def after_copies(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(self._copied)
            self._copied = None

    def wait(self) -> None:
        # This stream alone: what others write (NCCL's, FSDP's) is ordered before it.
        torch.cuda.current_stream(self.torch_device).synchronize()

    @property
    def total_memory(self) -> int:
        return _gpu_memory(self.torch_device)

    def peak_memory(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        # Else one high peak, of compilation or validation, would hide those of all later windows.
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return peak

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # the GPU's generator as well

    def random_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def restore_random(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)

    def profiled(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]


def _pin_in_parallel() -> None:
    """Let several threads touch the pages of pinned memory, unless the user has settings of the allocator."""
    if _ALLOCATOR_VARIABLES.isdisjoint(os.environ):
        # A release of torch without them; later ones warn of the function's place.
        with suppress(AttributeError, RuntimeError, ValueError), warnings.catch_warnings(action="ignore"):
            torch.cuda.memory._set_allocator_settings(_PINNING)


def _pinned_scalar() -> torch.Tensor:
    """An fp32 scalar of the host; a copy to memory that is not pinned would wait for the device."""
    return torch.zeros((), dtype=torch.float32, pin_memory=True)


def _stacked(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([it.to(torch.float64).unsqueeze(0) for it in values])


def memory_of(device: torch.device) -> int | None:
    """``Device.total_memory`` for what knows only where its tensors are."""
    return _gpu_memory(device) if device.type == "cuda" else None


def _gpu_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def gpu_or_cpu(process: ProcessInfo) -> Device:
    """The GPU of this process; the CPU where there is none."""
    if torch.cuda.is_available():
        return CudaDevice(process.local_rank)
    keep_freed_memory()
    return CpuDevice()


def keep_freed_memory() -> None:
    """Let tensors of the next step take over the memory of this one's, with glibc.

    By default it gives them back, and the kernel clears each page again (docs/benchmarks.md, The training loop).
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        # Setting either switches off glibc's own adjustment of both.
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def ask_for_determinism() -> None:
    """Deterministic kernels everywhere; cuBLAS needs its workspace fixed before its first use."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
