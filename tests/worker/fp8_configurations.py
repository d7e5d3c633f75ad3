"""Jobs in fp8 on processes that do not share all weights evenly, and with whatever checkpoints activations.

``torchrun --nproc-per-node=N fp8_configurations.py FOLDER``, N = 2 or 3.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from run_configurations import Harness
from worker_jobs import train_task

PARALLELISM: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offloaded": {"activation_checkpointing": "full", "offload_activations": True},
}


def run_all(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    harness = Harness(folder)
    # 96 rows of the feed-forward layer are even for three processes, 64 of the others are not.
    model = {"preset": "tiny", "config": {"hidden_size": 64, "intermediate_size": 96}}
    task = {"model": model, "micro_batch_size": 1, "global_batch_size": 6, "max_steps": 6}
    harness.run("bf16-plain", train_task(precision={"compute": "bf16"}, **task))
    for name, parallelism in PARALLELISM.items():
        harness.run(f"fp8-{name}", train_task(precision={"compute": "fp8"}, parallelism=parallelism, **task))
    harness.close()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
