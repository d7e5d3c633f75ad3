"""What a step reads back: two flags, and nothing else until a line, a validation or a save is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worker_jobs import job_environment, job_file, train_task

from sm_llm.worker.main import main
from sm_llm.worker.tasks.train import Trainer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


class ReadCounter(TorchDispatchMode):
    """Counts scalars that the host reads: ``item``, ``float``, ``bool`` and ``if`` of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_between_two_lines_reads_two_flags_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether to stop, a number of the host on all devices, and whether the step was finite, late on a GPU."""
    reads: dict[int, int] = {}
    advance = Trainer.advance

    def counted(self: Trainer, step: int) -> None:
        with ReadCounter() as counter:
            advance(self, step)
        reads[step] = counter.reads

    monkeypatch.setattr(Trainer, "advance", counted)
    task = train_task(
        max_steps=8, logging={"every_steps": 4}, checkpoint={"every_steps": 8}, validation={"every_steps": 8}
    )
    assert main("train", job_environment(job_file(task, tmp_path / "run", 1))) == 0
    assert {step: reads[step] for step in (2, 3, 5, 6, 7)} == dict.fromkeys((2, 3, 5, 6, 7), 2)
