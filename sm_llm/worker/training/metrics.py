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

_BUFFER_STEPS = 1024
_LOSS, _NORM, _TARGETS = range(3)

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


class StepBuffer:
    """A ring of per-step numbers on the device. Recording a step reads nothing back; ``flush`` does, once for all.

    Each loss is recorded by ``copies`` processes (those of a tensor-parallel group).
    """

    def __init__(self, device: torch.device, copies: int = 1, capacity: int = _BUFFER_STEPS) -> None:
        self._copies = copies
        self._values = torch.zeros((capacity, 3), dtype=torch.float64, device=device)
        self._recorded: list[tuple[int, float]] = []

    @property
    def is_full(self) -> bool:
        """Whether ``flush`` must come before the next ``record``."""
        return len(self._recorded) == self._values.shape[0]

    def record(
        self, step: int, loss_sum: torch.Tensor, norm: torch.Tensor, targets: torch.Tensor | int, rate: float
    ) -> None:
        """Keep one step: this rank's sum of token losses, the global gradient norm and the global count of targets."""
        row = self._values[len(self._recorded)]
        row[_LOSS] = loss_sum
        row[_NORM] = norm
        if isinstance(targets, int):
            row[_TARGETS].fill_(targets)  # an assignment would copy the number, and wait for the copy
        else:
            row[_TARGETS] = targets
        self._recorded.append((step, rate))

    def flush(self) -> list[Step]:
        """All recorded steps with the loss of the whole global batch. A collective: losses are summed over ranks."""
        count = len(self._recorded)
        if count == 0:
            return []
        losses = self._values[:count, _LOSS].contiguous()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(losses)
            losses /= self._copies
        rows = torch.cat([losses.unsqueeze(1), self._values[:count, 1:]], dim=1).tolist()
        steps = [
            Step(step, loss / targets if targets else math.nan, norm, rate, int(targets))
            for (step, rate), (loss, norm, targets) in zip(self._recorded, rows, strict=True)
        ]
        self._recorded.clear()
        return steps


@dataclass(frozen=True)
class Costs:
    """What a token costs, for throughput: FLOPs with their formula, and the peak of one device (None: unknown)."""

    tokens_per_step: int
    flops_per_token: float
    flops_formula: str
    peak_flops: float | None
    world_size: int


class Meter:
    """Times windows of steps, from one logged step to the next, without validation and saves."""

    def __init__(
        self, costs: Costs, device: torch.device, first_step: int, clock: Callable[[], float] = time.perf_counter
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
            device_memory_bytes=_device_memory(self._device),
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


def _device_memory(device: torch.device) -> int | None:
    """Peak bytes allocated on the GPU since the last call."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _host_memory() -> int:
    """Peak resident bytes of this process; what getrusage counts begins with those of the process that started it."""
    with suppress(OSError):
        if match := _PEAK.search(Path("/proc/self/status").read_text(encoding="utf-8")):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
