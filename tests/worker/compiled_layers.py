"""Every way of checkpointing, compiled and not, on the processes that torchrun started; rank 0 writes what it saw."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from worker_jobs import train_task

from sm_llm.data.source import Batch
from sm_llm.models.families.table import family
from sm_llm.spec.tasks import TrainTask
from sm_llm.worker.device import gpu_or_cpu
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.strategies import compiled
from sm_llm.worker.strategies.fsdp.strategy import FsdpStrategy
from sm_llm.worker.strategies.weights import InitialWeights
from sm_llm.worker.training.job_setup import set_up

if TYPE_CHECKING:
    from collections.abc import Iterable

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "budget": {"activation_checkpointing": "budget", "activation_memory_budget": 0.5},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "every_nth": {"activation_checkpointing": "every_nth", "checkpoint_every_layers": 2},
    "offload": {"activation_checkpointing": "full", "offload_activations": True},
}


SPLIT: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_degree": 2},
    "tensor-whole": {"tensor_parallel_degree": 2, "sequence_parallel": False},
    "tensor-selective": {"tensor_parallel_degree": 2, "activation_checkpointing": "selective"},
}
"""Matrices that two processes share."""
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "tensor-full": {"tensor_parallel_degree": 2, **WAYS["full"]},
    "tensor-budget": {"tensor_parallel_degree": 2, **WAYS["budget"]},
}
"""What torch cannot compile there."""


class SplitAttention(torch.nn.Module):
    """Attention with one head on each process."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = dist.get_world_size()
        for name in "qkvo":
            setattr(self, name, torch.nn.Linear(4 * self.heads, 4 * self.heads, bias=False))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        q, k, v = (getattr(self, name)(values).view(2, 8, 1, 4).transpose(1, 2) for name in "qkv")
        joined = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o(joined.transpose(1, 2).reshape(2, 8, 4))
        return out


def in_torch_alone() -> str:
    """Compiles a checkpointed ``SplitAttention`` with nothing of ours; returns torch's error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils.checkpoint import checkpoint

    module = SplitAttention()
    plan = {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()}
    parallelize_module(module, init_device_mesh("cpu", (module.heads,)), plan)
    torch._dynamo.reset()
    compute = torch.compile(lambda values: checkpoint(module, values, use_reentrant=False), backend="aot_eager")
    try:
        compute(torch.ones(2, 8, 4 * module.heads, requires_grad=True)).sum().backward()
    except AssertionError as error:
        return str(error)
    return ""


def train(way: str, process: ProcessInfo, folder: Path, *, compile_layers: bool) -> dict[str, Any]:
    """Two steps of a small model: losses and gradient norms, the names of the state, what was compiled."""
    precision = {"compute": "fp32", "compile": compile_layers}
    # Without its checks: what is refused is tried here.
    task = TrainTask.model_validate(
        train_task(parallelism={"strategy": "fsdp", **(WAYS | SPLIT | IMPOSSIBLE)[way]}, precision=precision)
    )
    strategy = FsdpStrategy(task, process, gpu_or_cpu(process))
    strategy.setup()
    setup = set_up(task, strategy.layout, process.local_world_size, folder)
    tensors = family(setup.config).tensors(setup.config)
    strategy.build(setup.config, InitialWeights(tensors, 0))
    strategy.train_mode(True)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(strategy.data_parallel_rank)).numpy()
    numbers, report = [], None
    for step in range(2):
        loss = strategy.forward_backward([Batch(ids, ids)], 1.0)
        norm, _ = strategy.update(1e-3, None, 1)
        numbers += [loss.item(), norm.item()]
        report = strategy.compilation() if step == 0 else report
    names = sorted(strategy.state_dict())
    return {"numbers": numbers, "names": names, "report": asdict(report) if report else None}


def every_way(ways: Iterable[str], process: ProcessInfo, folder: Path) -> dict[str, Any]:
    """Results by way of checkpointing: ``eager`` and ``compiled``."""
    compiled.BACKEND = "aot_eager"  # graphs are captured and differentiated alike, without a C++ compiler's time
    found = {}
    for way in ways:
        eager = train(way, process, folder, compile_layers=False)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found[way] = {"eager": eager, "compiled": train(way, process, folder, compile_layers=True)}
    return found


def every_split_way(process: ProcessInfo, folder: Path) -> dict[str, Any]:
    """Results of ``SPLIT``, and the ``error`` of what cannot be compiled."""
    found = every_way(SPLIT, process, folder)
    found["torch-alone"] = {"error": in_torch_alone()}
    for way in IMPOSSIBLE:
        torch._dynamo.reset()
        try:
            train(way, process, folder, compile_layers=True)
        except (AssertionError, RuntimeError) as error:
            found[way] = {"error": str(error)}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    process = ProcessInfo.read(os.environ)
    results = every_split_way(process, target) if os.environ.get("SPLIT") else every_way(WAYS, process, target)
    if os.environ["RANK"] == "0":
        (target / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()
