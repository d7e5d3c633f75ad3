"""Jobs of strategy smp on the contract double; ``torchrun … smp_configurations.py FOLDER``.

Every process runs every configuration; rank 0 writes results.json, with the calls that the double has recorded.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from run_configurations import Harness
from worker_jobs import MODEL, result_folder, train_task

LEAN = {"checkpoint": {"every_steps": 10}, "validation": {"every_steps": 10}}
SMP = {"strategy": "smp", "hybrid_shard_degree": 2, "activation_checkpointing": "none"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "native": {"hybrid_shard_degree": 0},
    "copies": {"hybrid_shard_degree": 1},
    "offloaded": {"activation_checkpointing": "full", "sm_activation_offloading": True},
    "fp8": {"fp8": True, "activation_checkpointing": "full", "delayed_parameter_initialization": False},
}
"""Of two processes. The double computes fp8 in full precision, so its losses are those of the others."""


def task(**changes: Any) -> dict[str, Any]:
    parallelism = {**SMP, **changes.pop("parallelism", {})}
    return train_task(parallelism=parallelism, **changes)


class SmpHarness(Harness):
    """Every job is a process's own in truth: the library is started once in each."""

    def run(self, name: str, task: dict[str, Any], **how: Any) -> None:
        contract = sys.modules.get("torch.sagemaker.contract")
        if contract is not None:
            contract.calls.clear()
        super().run(name, task, **how)
        contract = sys.modules["torch.sagemaker.contract"]
        seen = [[call, {key: str(value) for key, value in options.items()}] for call, options in contract.calls]
        self.results.setdefault("calls", {})[name] = seen


def two(harness: Any) -> None:
    for name, degrees in LAYOUTS.items():
        harness.run(name, task(parallelism=degrees, **LEAN))
    harness.run("whole", task(checkpoint={"every_steps": 3, "verify_state": True}, validation={"every_steps": 3}))
    harness.run("broken", task(checkpoint={"every_steps": 3, "verify_state": True}), break_at=8)
    harness.run("broken", task(checkpoint={"every_steps": 3, "verify_state": True}), attempt=2)
    tied = {**MODEL, "tie_word_embeddings": True}
    harness.run("tied", task(model={"preset": "tiny", "config": tied}, max_steps=2, **LEAN))
    drawn = task(parallelism={"fp8": True}, max_steps=2, **LEAN)  # the library draws the weights of its own layers
    harness.run("drawn", drawn)
    start = {"pretrained": str(result_folder(harness.folder / "sharded"))}
    for name, fp8 in (("pretrained", False), ("pretrained-fp8", True)):
        fields = {"start": start, "model": {"preset": None, "config": {}}, "max_steps": 2, **LEAN}
        harness.run(name, task(parallelism={"fp8": fp8}, **fields))
    harness.run("left", task(), break_at=7)
    harness.run("left", train_task(), attempt=2, fails=True)
    harness.run("left", task(parallelism={"hybrid_shard_degree": 1}), attempt=3, fails=True)


def four(harness: Any) -> None:
    """Two copies, and what two processes left with one."""
    harness.run("hybrid", task(**LEAN))
    harness.run("in-memory", task(parallelism={"delayed_parameter_initialization": False}, **LEAN))
    harness.run("bf16", task(precision={"compute": "bf16"}, **LEAN))
    harness.run("left", task(), attempt=4)


def use_double() -> None:
    """What a process with the double's folder on PYTHONPATH does at its start; a forked one has started before."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures" / "smp_double"))
    sys.modules.pop("sitecustomize", None)  # that of another folder
    import_module("sitecustomize")


def run_all(folder: Path) -> None:
    use_double()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    harness = SmpHarness(folder)
    if harness.world == 2:
        two(harness)
    else:
        four(harness)
    harness.close()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
