"""Makes the strategy of a task, and finds the device it runs on, by the rows of ``spec.parallelism.table``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sm_llm.spec.parallelism.table import STRATEGIES

if TYPE_CHECKING:
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.device import Device
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.strategies.base import Strategy


def find_device(strategy: str, process: ProcessInfo) -> Device:
    """The device on which this process trains with a strategy, made its current one."""
    device: Device = _named(STRATEGIES[strategy].device)(process)
    return device


def make_strategy(task: TrainTask, process: ProcessInfo, device: Device) -> Strategy:
    """The strategy of ``task.parallelism``."""
    strategy: Strategy = _named(STRATEGIES[task.parallelism.strategy].worker)(task, process, device)
    return strategy


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
