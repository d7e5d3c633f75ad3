"""The kernel that should compute attention, by GPU and model; what computes it is found by the worker."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.launcher.planner import plan
from sm_llm.spec.machines.hardware import attention_kernel


@pytest.mark.parametrize(
    ("device", "compute", "head_size", "options", "name"),
    [
        ("NVIDIA H200", "bf16", 128, {}, "cudnn"),
        ("NVIDIA H100 80GB HBM3", "fp8", 64, {}, "cudnn"),
        ("NVIDIA H200", "fp32", 128, {}, "efficient"),
        ("NVIDIA H200", "bf16", 132, {}, "flash"),
        ("NVIDIA H200", "bf16", 512, {}, "efficient"),
        ("NVIDIA A100-SXM4-80GB", "bf16", 128, {}, "flash"),
        ("Tesla T4", "bf16", 128, {}, "efficient"),
        ("NVIDIA H200", "bf16", 128, {"is_shared": True}, "ring"),
        ("NVIDIA H200", "bf16", 128, {"in_window": True}, "flex"),
        ("NVIDIA H200", "bf16", 128, {"in_window": True, "drops": True}, "efficient"),
        ("NVIDIA H200", "bf16", 128, {"in_window": True, "is_shared": True}, "efficient"),
        ("NVIDIA H200", "bf16", 128, {"drops": True}, "cudnn"),
    ],
)
def test_of_a_gpu(device: str, compute: str, head_size: int, options: dict[str, Any], name: str) -> None:
    assert attention_kernel(device, compute, head_size, **options) == name


@pytest.mark.parametrize(
    ("preset", "fields", "name"),
    [
        ("llama-3.1-8b", (), "cudnn"),
        ("llama-3.1-8b", ("task.parallelism.context_parallel_degree=2", "compute.processes_per_instance=2"), "ring"),
        ("mistral-7b", (), "flex"),
        ("mistral-7b", ("task.data.seq_length=4096",), "cudnn"),  # the window hides nothing
        ("mistral-7b", ("task.model.config.attention_dropout=0.1",), "efficient"),
    ],
)
def test_of_a_plan(preset: str, fields: tuple[str, ...], name: str) -> None:
    task = {"kind": "train", "model": {"preset": preset}, "data": {"format": "synthetic", "seq_length": 8192}}
    [found] = plan({"name": "x", "task": {**task, "max_steps": 1}, "compute": {"gpu": "H200"}}, *fields)
    assert found.attention == name


def test_of_a_machine_without_gpus_nothing_is_expected() -> None:
    assert plan("smoke")[0].attention is None
