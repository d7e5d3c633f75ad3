"""Every strategy and every device has all methods of its interface, with the parameters that it names."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sm_llm.spec.parallelism.table import STRATEGIES
from sm_llm.worker.device import CpuDevice, CudaDevice, Device
from sm_llm.worker.strategies.base import Strategy
from sm_llm.worker.strategies.nxd.device import NeuronDevice
from sm_llm.worker.training import job_setup


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


def test_only_the_device_and_the_strategies_name_a_kind_of_device() -> None:
    """The loop and its parts ask the interface; ``torch.cuda`` and its like would bind them to one kind."""
    worker = Path(job_setup.__file__).parents[1]
    found = {
        path.relative_to(worker).as_posix()
        for path in worker.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"torch\.(cuda|xpu|mps|neuron)", ast.unparse(node))
    }
    assert {it for it in found if not it.startswith(("device.py", "strategies/"))} == set()
    assert "device.py" in found
