"""Speed of compiled training with activation checkpointing, in the worker's own loop on random tokens.

``torchrun --standalone --nproc-per-node=2 benchmarks/compile.py [--preset llama-3.1-8b] [--seq-length 8192]
[--checkpointing selective] [--eager] [--blocks 4]``

Prints tokens/s per GPU (median of blocks of 5 steps, after 5 that compile and warm up), peak memory and the first and
last loss. Two commits are compared by running it with ``PYTHONPATH=CHECKOUT`` of each in turn. Weights begin as a
repeated block of random numbers, since drawing 8 billion takes longer than the measurement, and nothing is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from loop import Ours

from sm_llm.worker.tasks import train

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 5
"""Steps between two readings of the clock."""


def task(options: argparse.Namespace, world: int) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": {"preset": options.preset},
        "data": {"format": "synthetic", "seq_length": options.seq_length, "rows": 4096},
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": world * options.micro_batch_size,
        "max_steps": 1_000_000,
        "optim": {"learning_rate": 1e-4, "schedule": "constant"},
        "precision": {"compute": "bf16", "compile": not options.eager},
        "parallelism": {"activation_checkpointing": options.checkpointing},
        "checkpoint": {"every_steps": 1_000_000},
        "logging": {"every_steps": 1_000_000},
    }


class RepeatedWeights:
    """Norms of one, everything else a block of normal numbers, as often as it takes."""

    def __init__(self) -> None:
        self._block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        if len(sizes) == 1:
            return torch.ones(tuple(sizes))
        count = sizes[0] * sizes[1]
        return self._block.repeat(-(-count // len(self._block)))[:count].view(tuple(sizes))


def measure(options: argparse.Namespace, world: int) -> dict[str, Any]:
    train.first_weights = lambda *_: RepeatedWeights()  # type: ignore[assignment]
    train.check_space = lambda *_: None  # type: ignore[assignment]
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        began = time.perf_counter()
        ours = Ours(Path(folder), task(options, world))
        ready = time.perf_counter() - began
        began = time.perf_counter()
        ours.block(1)
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        ours.block(BLOCK - 1)
        losses += [it.loss for it in ours.training.flush()]
        taken = []
        for _ in range(options.blocks):
            torch.cuda.synchronize()
            began = time.perf_counter()
            ours.block(BLOCK)
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - began) / BLOCK)
        losses += [it.loss for it in ours.training.flush()]
        ours.training.batches.close()
    tokens = options.micro_batch_size * options.seq_length
    return {
        "cards": f"{world} x {torch.cuda.get_device_name()}",
        "preset": options.preset,
        "checkpointing": options.checkpointing,
        "compile": not options.eager,
        "tokens_per_second_per_gpu": tokens / statistics.median(taken),
        "step_seconds": taken,
        "first_step_seconds": first,
        "build_seconds": ready,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": [losses[0], losses[-1]],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--blocks", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    result = measure(arguments(), int(os.environ["WORLD_SIZE"]))
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()
