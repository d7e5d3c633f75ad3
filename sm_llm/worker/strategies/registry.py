"""Which class trains which ``parallelism.strategy``, and on which device."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.place import Place
    from sm_llm.worker.strategies.base import Strategy
    from sm_llm.worker.strategies.device import Device

_PACKAGE = "sm_llm.worker.strategies"
_ROWS = {
    "fsdp": ("fsdp.strategy.FsdpStrategy", "device.gpu_or_cpu"),
    "smp": ("smp.strategy.SmpStrategy", "device.gpu_or_cpu"),
    "nxd": ("nxd.strategy.NxdStrategy", "nxd.device.neuron_core"),
}
"""Strategy -> its class, and the function that finds a process's device. Names, because each class lives in a software
stack of its own and is imported alone."""


def trained() -> frozenset[str]:
    """The strategies that this worker trains with."""
    return frozenset(_ROWS)


def find_device(strategy: str, place: Place) -> Device:
    """The device on which this process trains with a strategy, made its current one."""
    device: Device = _named(_ROWS[strategy][1])(place)
    return device


def make_strategy(task: TrainTask, place: Place, device: Device) -> Strategy:
    """The strategy of ``task.parallelism``."""
    strategy: Strategy = _named(_ROWS[task.parallelism.strategy][0])(task, place, device)
    return strategy


def _named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(f"{_PACKAGE}.{module}"), attribute)
