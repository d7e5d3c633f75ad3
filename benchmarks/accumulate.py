"""What it costs to reduce gradients to shards in every micro-batch instead of after the last one alone.

``torchrun --standalone --nproc-per-node=N benchmarks/accumulate.py [--preset llama-3.2-1b] [--accumulate 8]
[--seq-length 2048] [--pairs 15]``

One step of the worker's own loop with reduction in every micro-batch (ours), and one where FSDP2 keeps whole gradients
until the last (``set_requires_gradient_sync``), in turns, in one job. Told are the ratio of the times of a step, with a
bootstrap interval of the median, and the peak of GPU memory of each.
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
from loop import Ours, interval

if TYPE_CHECKING:
    from collections.abc import Iterator


def task(preset: str, accumulate: int, seq_length: int, world: int) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": {"preset": preset},
        "data": {"format": "synthetic", "seq_length": seq_length, "rows": 4096},
        "micro_batch_size": 1,
        "global_batch_size": world * accumulate,
        "max_steps": 1_000_000,
        "optim": {"learning_rate": 1e-4, "schedule": "constant"},
        "precision": {"compute": "bf16"},
        "parallelism": {"activation_checkpointing": "full"},
        "checkpoint": {"every_steps": 1_000_000},
        "logging": {"every_steps": 1_000},
    }


class Ways:
    """Both ways of accumulating, in the same job."""

    def __init__(self, ours: Ours) -> None:
        self.ours, self.strategy = ours, ours.training.strategy
        self._reducing = self.strategy.accumulate

    @contextlib.contextmanager
    def _keeping(self, last: bool) -> Iterator[None]:
        model: Any = self.strategy._model  # type: ignore[attr-defined]
        model.set_requires_gradient_sync(last)
        yield

    def step(self, *, keep: bool) -> tuple[float, int]:
        """Seconds of one step, and the bytes of GPU memory at its peak."""
        self.strategy.accumulate = self._keeping if keep else self._reducing  # type: ignore[method-assign]
        torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.ours.block(1)
        torch.cuda.synchronize()
        return time.perf_counter() - began, torch.cuda.max_memory_allocated()


def measure(pairs: int, job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ways = Ways(Ours(Path(folder), job))
        for keep in (False, True):
            ways.step(keep=keep)
        taken: list[dict[bool, tuple[float, int]]] = []
        for pair in range(pairs):
            order = (False, True) if pair % 2 else (True, False)
            taken.append({keep: ways.step(keep=keep) for keep in order})
        ways.ours.training.batches.close()
    ratios = [it[False][0] / it[True][0] for it in taken]
    return {
        "cards": f"{dist.get_world_size()} x {torch.cuda.get_device_name()}",
        "preset": job["model"]["preset"],
        "accumulate": job["global_batch_size"] // dist.get_world_size(),
        "pairs": pairs,
        "seconds_reducing": statistics.median(it[False][0] for it in taken),
        "seconds_keeping": statistics.median(it[True][0] for it in taken),
        "time_ratio": statistics.median(ratios),
        "time_ratio_interval": list(interval(ratios)),
        "peak_gib_reducing": max(it[False][1] for it in taken) / 2**30,
        "peak_gib_keeping": max(it[True][1] for it in taken) / 2**30,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.2-1b")
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    result = measure(options.pairs, task(options.preset, options.accumulate, options.seq_length, world))
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=2))
    dist.destroy_process_group()
