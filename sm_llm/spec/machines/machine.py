"""What this machine offers to local jobs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from sm_llm.spec.machines.hardware import Card

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable with the devices that a process sees."""
_TOOL_SECONDS = 20.0


@dataclass(frozen=True)
class Machine:
    """What this machine offers: CPU cores we may use, and GPU ids as ``CUDA_VISIBLE_DEVICES`` spells them."""

    cpus: int
    gpus: tuple[str, ...] = ()


def own_card() -> Card | None:
    """The GPU with the least memory of those that this machine shows, as the driver's tool reports them."""
    return _asked_cards() if this_machine().gpus else None


@cache
def _asked_cards() -> Card | None:
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [line.rpartition(", ") for line in output.splitlines()]
    found = [Card(name, int(mib) / 1024) for name, _, mib in rows if mib.strip().isdigit()]
    return min(found, key=lambda it: it.gib, default=None)


def this_machine(environ: Mapping[str, str] = os.environ, devices: Path | None = None) -> Machine:
    """Cores of this process's affinity mask and the visible NVIDIA devices; loads no CUDA library."""
    # taskset or a scheduler may leave this process fewer cores than the machine has.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    visible = environ.get(VISIBLE)
    # An empty value hides all GPUs.
    if visible is not None:
        return Machine(cpus, tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")))
    files = (devices or DEVICES).glob("nvidia[0-9]*")
    numbers = sorted(int(path.name[6:]) for path in files if path.name[6:].isdigit())
    # CUDA numbers the devices that it sees from 0 on, whatever the numbers of their files.
    return Machine(cpus, tuple(str(index) for index in range(len(numbers))))
