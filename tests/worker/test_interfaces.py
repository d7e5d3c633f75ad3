"""Every strategy and every device has all methods of its interface, with the parameters that it names."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from sm_llm.spec.parallelism.table import STRATEGIES
from sm_llm.worker.device import CpuDevice, CudaDevice, Device
from sm_llm.worker.strategies.base import Strategy
from sm_llm.worker.strategies.nxd.device import NeuronDevice


def differences(kind: type, interface: Any) -> list[str]:
    wanted = {name: it for name, it in vars(interface).items() if inspect.isfunction(it) and not name.startswith("_")}
    assert wanted
    return [
        name
        for name, it in wanted.items()
        if list(inspect.signature(getattr(kind, name, lambda: None)).parameters)
        != list(inspect.signature(it).parameters)
    ]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_methods_of_the_interface(name: str) -> None:
    module, _, attribute = STRATEGIES[name].worker.partition(":")
    assert differences(getattr(import_module(module), attribute), Strategy) == []


@pytest.mark.parametrize("kind", [CpuDevice, CudaDevice, NeuronDevice])
def test_a_device_has_the_methods_of_the_interface(kind: type) -> None:
    assert differences(kind, Device) == []
