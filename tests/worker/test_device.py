"""Memory of the CPU that one step frees and the next one needs; GPUs that read one another's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sm_llm.worker.device import CpuDevice, CudaDevice

PROGRAM = """
import sys, torch
from sm_llm.worker.device import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1])

if sys.argv[1] == "kept":
    keep_freed_memory()
tensor = torch.ones(4 << 20)  # 16 MiB
held = resident()
del tensor
print(held - resident())
"""


def pages_given_back(how: str) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", PROGRAM, how]
    return int(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)


def test_a_step_takes_over_the_memory_of_the_step_before() -> None:
    assert pages_given_back("kept") < 100 < 4000 < pages_given_back("not kept")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Mock]:
    """Two GPUs that read one another's memory."""
    facts = {
        "device_count": Mock(return_value=2),
        "can_device_access_peer": Mock(return_value=True),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, fact)
    return facts


def first_gpu(name: str = "NVIDIA H200") -> CudaDevice:
    device = object.__new__(CudaDevice)
    device.torch_device, device.name = torch.device("cuda", 0), name
    return device


def test_a_gpu_that_reads_all_others_of_its_node_may_copy_from_them(cuda: dict[str, Mock]) -> None:
    assert first_gpu().copy_obstacle(2, is_asked_for=False) == ""
    cuda["can_device_access_peer"].assert_called_once_with(torch.device("cuda", 0), 1)


@pytest.mark.parametrize(
    ("fact", "value", "named"),
    [
        ("device_count", 1, "not every process sees all GPUs of the node"),
        ("can_device_access_peer", False, "GPU 0 cannot read the memory of GPU 1"),
    ],
)
@pytest.mark.parametrize("is_asked_for", [True, False])
def test_what_keeps_gpus_from_copying_is_named(
    cuda: dict[str, Mock], fact: str, value: Any, named: str, is_asked_for: bool
) -> None:
    cuda[fact].return_value = value
    assert first_gpu().copy_obstacle(2, is_asked_for=is_asked_for) == named


@pytest.mark.parametrize(
    ("name", "is_joined"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA B200", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H200 NVL", False),
        ("NVIDIA A10G", False),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
    ],
)
def test_gpus_copy_by_themselves_where_nvlink_joins_them(cuda: dict[str, Mock], name: str, is_joined: bool) -> None:
    reason = "" if is_joined else f"{name} is not known to be joined by NVLink"
    assert first_gpu(name).copy_obstacle(2, is_asked_for=False) == reason
    assert first_gpu(name).copy_obstacle(2, is_asked_for=True) == "", "who asks for them gets them"


def test_a_cpu_has_no_copy_engine() -> None:
    assert CpuDevice().copy_obstacle(1, is_asked_for=True) == "there is no GPU"
