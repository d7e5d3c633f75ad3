"""What the loop measures: every step's loss and gradient norm, kept on the device until it is read, and throughput."""

from __future__ import annotations

import math
import re
import resource
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sm_llm.runs.events.events import Step, Throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sm_llm.worker.device import Device

# Scalars on the device that are read back at the latest after so many steps, whatever the logging interval.
_BUFFER_STEPS = 1024

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True)
class _Recorded:
    step: int
    rate: float
    loss_sum: torch.Tensor
    norm: torch.Tensor
    targets: torch.Tensor | int


class StepBuffer:
    """Per-step numbers, kept on the device. Recording a step reads nothing back; ``flush`` does, once for all.

    The scalars are kept as they are: copying them into one tensor would cost each step a kernel for each of them.
    Each loss is recorded by ``copies`` processes (those of a tensor-parallel group).
    """

    def __init__(self, device: Device, copies: int = 1, capacity: int = _BUFFER_STEPS) -> None:
        self._device = device
        self._copies = copies
        self._capacity = capacity
        self._recorded: list[_Recorded] = []

    @property
    def is_full(self) -> bool:
        """Whether ``flush`` must come before the next ``record``."""
        return len(self._recorded) == self._capacity

    def record(
        self, step: int, loss_sum: torch.Tensor, norm: torch.Tensor, targets: torch.Tensor | int, rate: float
    ) -> None:
        """Keep one step: this rank's sum of token losses, the global gradient norm and the global count of targets."""
        self._recorded.append(_Recorded(step, rate, loss_sum, norm, targets))

    def flush(self) -> list[Step]:
        """All recorded steps with the loss of the whole global batch. A collective: losses are summed over ranks."""
        recorded, self._recorded = self._recorded, []
        if not recorded:
            return []
        # One collective and one transfer for all steps since the last flush.
        losses = self._device.scalars([it.loss_sum for it in recorded])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(losses)
            losses /= self._copies
        norms = self._device.scalars([it.norm for it in recorded])
        return [
            Step(it.step, loss / targets if targets else math.nan, norm, it.rate, int(targets))
            for it, loss, norm, targets in zip(
                recorded, losses.tolist(), norms.tolist(), _numbers([it.targets for it in recorded]), strict=True
            )
        ]


def _numbers(counts: list[torch.Tensor | int]) -> list[float]:
    """Counts, some of them on a device, in one transfer."""
    # ``item`` of each would wait for the device as often as there are steps.
    waiting = [it for it in counts if isinstance(it, torch.Tensor)]
    found = iter(torch.cat([it.unsqueeze(0) for it in waiting]).tolist() if waiting else [])
    return [next(found) if isinstance(it, torch.Tensor) else float(it) for it in counts]


@dataclass(frozen=True)
class Costs:
    """What a token costs, for throughput: FLOPs with their formula, and the peak of one device (None: unknown)."""

    tokens_per_step: int
    flops_per_token: float
    flops_formula: str
    peak_flops: float | None
    world_size: int


class ThroughputMeter:
    """Times windows of steps, from one logged step to the next, without validation and saves."""

    def __init__(
        self, costs: Costs, device: Device, first_step: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._costs = costs
        self._device = device
        self._clock = clock
        self._last_step = first_step
        self._began = clock()
        self._data_wait = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        began = self._clock()
        yield
        # The window's beginning moves by the pause, so that the window keeps its own time alone.
        self._began += self._clock() - began

    def read(self, step: int, data_wait_seconds: float) -> Throughput:
        """The window that ends with ``step`` (the device has finished it), and begin the next one.

        ``data_wait_seconds`` is the total so far. Model FLOPs utilisation is tokens/s/device x FLOPs/token / peak.
        """
        now = self._clock()
        seconds, steps = now - self._began, step - self._last_step
        rate = steps * self._costs.tokens_per_step / seconds
        per_device = rate / self._costs.world_size
        peak = self._costs.peak_flops
        window = Throughput(
            step=step,
            tokens_per_second=rate,
            tokens_per_second_per_device=per_device,
            mfu=None if peak is None else per_device * self._costs.flops_per_token / peak,
            step_seconds=seconds / steps,
            data_wait_seconds=data_wait_seconds - self._data_wait,
            device_memory_bytes=self._device.peak_memory(),
            host_memory_bytes=_host_memory(),
        )
        self._began, self._last_step, self._data_wait = now, step, data_wait_seconds
        return window

    def line(self, step: Step, window: Throughput, total_steps: int) -> str:
        """The training line. ``Loss:`` is what HyperPod's hang detection matches."""
        parts = [
            f"step {step.step}/{total_steps}",
            f"Loss: {step.loss:.4f}",
            f"{window.tokens_per_second_per_device:.0f} tokens/s/device",  # no separators: CloudWatch reads it
            f"{window.tokens_per_second:.0f} tokens/s in all" if self._costs.world_size > 1 else "",
            self._mfu(window),
            _memory(window),
            f"grad norm {step.grad_norm:.3f}",
            f"lr {step.learning_rate:.3e}",
            f"data wait {window.data_wait_seconds:.2f} s",
        ]
        return " | ".join(part for part in parts if part)

    def _mfu(self, window: Throughput) -> str:
        if window.mfu is None or self._costs.peak_flops is None:
            return ""
        peak = self._costs.peak_flops / 1e12
        return f"MFU {100 * window.mfu:.1f}% ({self._costs.flops_formula}; of {peak:.0f} TFLOP/s)"


def _memory(window: Throughput) -> str:
    device = window.device_memory_bytes
    parts = [] if device is None else [f"{device / 2**30:.2f} GiB device"]
    return "memory " + " + ".join([*parts, f"{window.host_memory_bytes / 2**30:.2f} GiB host"])


def _host_memory() -> int:
    """Peak resident bytes of this process; what getrusage counts begins with those of the process that started it."""
    with suppress(OSError):
        # VmHWM: the peak of this program alone, see proc_pid_status(5).
        if match := _PEAK.search(Path("/proc/self/status").read_text(encoding="utf-8")):
            return int(match[1]) * 1024
    # Not Linux: the peak then includes that of the process that started this one.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
