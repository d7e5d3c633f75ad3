"""``precision.compute: auto`` follows the processor, and only where nobody chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from worker_jobs import train_task

from sm_llm.spec.tasks import TrainTask
from sm_llm.worker.device import CpuDevice
from sm_llm.worker.training.job_setup import settled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("precision", "flags", "expected"),
    [
        ({"compute": "auto"}, "flags : fpu avx2 avx512_bf16", "bf16"),
        ({"compute": "auto"}, "Features : fp asimd bf16", "bf16"),
        ({"compute": "auto"}, "flags : fpu avx2", "fp32"),
        ({"compute": "auto", "master": "bf16"}, "flags : fpu avx2", "bf16"),
        ({"compute": "bf16"}, "flags : fpu avx2", "bf16"),
        ({"compute": "fp32"}, "flags : amx_bf16", "fp32"),
    ],
)
def test_the_format_follows_the_processor(precision: dict[str, str], flags: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    task = TrainTask.model_validate(train_task(precision=precision))
    assert settled(task, CpuDevice(tmp_path / "cpuinfo")).precision.compute == expected


def test_an_unknown_processor_computes_in_fp32(tmp_path: Path) -> None:
    task = TrainTask.model_validate(train_task(precision={"compute": "auto"}))
    assert settled(task, CpuDevice(tmp_path / "missing")).precision.compute == "fp32"
