"""Every product of degrees on GPUs in bf16, by NCCL: ``torchrun --nproc-per-node=N gpu_parallel.py FOLDER``.

N = 1 trains what the others are compared with; 2 and 4 print a table against it where it lies beside FOLDER, in
``parallel-1``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from parallel_configurations import FAMILIES
from run_configurations import Harness
from worker_jobs import events, losses, train_task

from sm_llm.worker.tasks import train as train_module

STEPS = 50
TOLERANCE = 2e-2
WARM = 5
"""Steps after which nothing may wait for the device any more."""
MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
DEGREES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {
        "fsdp-2": {},
        "copies-2": {"sharding": "none"},
        "tp-2": {"tensor_parallel_degree": 2},
        "tp-2-whole": {"tensor_parallel_degree": 2, "sequence_parallel": False},
        "cp-2": {"context_parallel_degree": 2},
        "fsdp-2-selective": {"activation_checkpointing": "selective"},
        "fsdp-2-offload": {
            "activation_checkpointing": "full",
            "offload_activations": True,
            "offload_optimizer": True,
        },
    },
    4: {
        "fsdp-4": {},
        "hybrid-2x2": {"sharding": "hybrid", "hybrid_shard_degree": 2},
        "tp-2-fsdp-2": {"tensor_parallel_degree": 2},
        "cp-2-fsdp-2": {"context_parallel_degree": 2},
        "cp-4": {"context_parallel_degree": 4},
        "tp-2-cp-2": {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
        "tp-2-copies-2": {"tensor_parallel_degree": 2, "sharding": "none"},
    },
}


def gpu_task(**changes: Any) -> dict[str, Any]:
    """8 sequences of 256 random tokens a step, 64 of them in all: 50 steps learn them by heart in part."""
    task = train_task(
        data={"format": "synthetic", "seq_length": 256, "rows": 64, "validation_rows": 8},
        max_steps=STEPS,
        precision={"compute": "bf16"},
        optim={"learning_rate": 1e-3, "min_learning_rate": 1e-4},
        checkpoint={"every_steps": STEPS},
        validation={"every_steps": STEPS},
        logging={"every_steps": 10},
        deterministic=False,
    )
    return {**task, "model": {"preset": "tiny", "config": MODEL}, **changes}


def family_task(folder: Path, name: str) -> dict[str, Any]:
    location = folder / "configs" / name
    if dist.get_rank() == 0:
        location.mkdir(parents=True, exist_ok=True)
        (location / "config.json").write_text(json.dumps({**MODEL, **FAMILIES[name], "head_dim": 64}))
    dist.barrier()
    return gpu_task(model={"path": str(location)})


class SyncCount:
    """Counts operations of a warm step that waited for the device, where torch reports it."""

    def __init__(self) -> None:
        self.found = 0

    def watch(self) -> None:
        original = train_module.Trainer.take_step

        def take_step(training: Any, step: int, batches: Any) -> None:
            if step <= WARM:
                return original(training, step, batches)
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                original(training, step, batches)
            torch.cuda.set_sync_debug_mode("default")
            self.found += sum("synchroniz" in str(it.message) for it in caught)
            return None

        train_module.Trainer.take_step = take_step  # type: ignore[method-assign]


def row(name: str, run: Path, base: Path, syncs: int) -> str:
    """One line of the table for docs/verified.md."""
    ours, theirs = losses(run), losses(base)
    difference = max(abs(ours[step] - theirs[step]) for step in theirs)
    window = events(run, "throughput")[-1]
    memory = window["device_memory_bytes"] / 2**20
    return f"| {name} | {difference:.1e} | {ours[STEPS]:.4f} | {memory:.0f} | {syncs} |"


def run_all(folder: Path) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    folder.mkdir(parents=True, exist_ok=True)
    harness, count = Harness(folder), SyncCount()
    count.watch()
    jobs = {name: gpu_task(parallelism=degrees) for name, degrees in DEGREES[harness.world].items()}
    jobs |= {f"family-{name}": family_task(folder, name) for name in FAMILIES}
    syncs, failed, rows = {}, {}, []
    for name, task in jobs.items():
        count.found = 0
        try:
            harness.run(name, task)
        except AssertionError as error:
            failed[name] = str(error)
            continue
        syncs[name] = count.found
        base = folder.parent / "parallel-1" / (name if name.startswith("family") else "alone")
        if base.is_dir() and dist.get_rank() == 0:
            rows.append(row(name, folder / name, base, syncs[name]))
    if dist.get_rank() == 0:
        cards = f"{harness.world} x {torch.cuda.get_device_name()}"
        head = f"| {cards} | largest difference of a loss | loss of step {STEPS} | peak MiB | waits |"
        table = "\n".join([head, "|---|---|---|---|---|", *rows])
        print(f"{table}\nfailed: {failed or 'none'}", flush=True)
        (folder / "table.md").write_text(table + "\n")
        (folder / "results.json").write_text(json.dumps({"syncs": syncs, "failed": failed}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
