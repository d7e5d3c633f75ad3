"""What only a GPU shows: compilation, utilisation and peak memory. (The other tests of this folder use GPUs, too.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from worker_jobs import events, job_environment, job_file, losses, train_task

from sm_llm.worker.main import main

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_compiled_layers_learn_the_same(tmp_path: Path) -> None:
    for name, compiled in (("eager", False), ("compiled", True)):
        task = train_task(precision={"compute": "bf16", "compile": compiled}, deterministic=False)
        assert main("train", job_environment(job_file(task, tmp_path / name, 1))) == 0
    eager, compiled_losses = losses(tmp_path / "eager"), losses(tmp_path / "compiled")
    assert max(abs(eager[step] - compiled_losses[step]) for step in eager) < 2e-2
    window = events(tmp_path / "eager", "throughput")[-1]
    assert window["device_memory_bytes"] > 0
    assert 0 < window["mfu"] < 1
