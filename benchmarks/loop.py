"""What our training loop costs over a bare PyTorch loop, and how long an asynchronous save blocks it.

``python benchmarks/loop.py [--pairs 15] [--steps 10] [--precision fp32|bf16] [--threads 1] [--json FILE]``

Both loops train the same Hugging Face Llama on the same rows from the same weights, in one process, in turns: a pair
is a block of steps of each. Ours is the worker's own loop: loader, metrics on the device, the mask and the flags of
steps that are not finite, the stop flag, the watchdog's pulse, a training line per block. The bare loop has its
batches in memory and reads its loss once per block. Overhead is the ratio of their times; the interval is a bootstrap
of the median; on a busy machine the ratio of CPU times is the steadier one. Saves are timed in pairs, too:
asynchronous against synchronous.
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

import numpy as np
import torch

from sm_llm.contract.job_file import JOB_ENVIRONMENT, JobFile
from sm_llm.spec.job import JobSpec
from sm_llm.spec.tasks import TrainTask
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.strategies.model import build_on_meta, materialise
from sm_llm.worker.strategies.table import find_device, make_strategy
from sm_llm.worker.strategies.weights import InitialWeights
from sm_llm.worker.tasks.train import Trainer
from sm_llm.worker.training import random_state
from sm_llm.worker.training.automatic import with_choices
from sm_llm.worker.training.job_setup import config_of, set_up

if TYPE_CHECKING:
    from collections.abc import Callable

RATE = 1e-3


def small_task(precision: str, steps: int, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """A Llama of 2.9 M parameters, unless ``config`` changes it; 4 rows of 256 tokens a step: 0.1 s on one core."""
    return {
        "kind": "train",
        "model": {"preset": "tiny", "config": {"num_hidden_layers": 2, "vocab_size": 4096, **(config or {})}},
        "data": {"format": "synthetic", "seq_length": 256, "rows": 4096},
        "micro_batch_size": 4,
        "max_steps": 1_000_000,
        "optim": {"learning_rate": RATE, "schedule": "constant", "weight_decay": 0.0},
        "precision": {"compute": precision},
        "checkpoint": {"every_steps": 1_000_000},
        "logging": {"every_steps": steps},
    }


class Ours:
    """The worker's loop, advanced by blocks of steps."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        spec = JobSpec.model_validate({"name": "loop", "task": task}, strict=False)
        job = JobFile(run_id="loop", attempt=1, run_uri=str(folder / "run"), spec=spec, spec_digest="")
        job.write(folder / "job.json")
        (folder / "run").mkdir(exist_ok=True)  # by a launcher, elsewhere
        base = {"SAGEMAKER_BASE_DIR": str(folder / "base"), JOB_ENVIRONMENT: str(folder / "job.json")}
        context = WorkerContext.read({**os.environ, **base})
        assert isinstance(spec.task, TrainTask)
        device = find_device(spec.task.parallelism.strategy, context.process)
        chosen = with_choices(context, spec.task, config_of(spec.task), device)
        strategy = make_strategy(chosen, context.process, device)
        strategy.setup()
        self.setup = set_up(chosen, strategy.layout, context.process.local_world_size, context.scratch)
        self.training = Trainer(context, self.setup, strategy)
        self.training.begin()
        self.step = 0

    def block(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.training.advance(self.step)

    def save_began(self) -> float:
        """Seconds that the loop is blocked by a save, which is written beside what comes next."""
        began = time.perf_counter()
        self.training.save(self.step)
        return time.perf_counter() - began

    def save(self, *, wait: bool) -> float:
        """Seconds the loop is blocked by a save that it waits for, or not."""
        private = {"random": random_state.capture(self.training.strategy.device), "stream": {}}
        checkpointer, state = self.training.checkpointer, self.training.strategy.state_dict()
        blocked = checkpointer.save(self.step, state, private, {"plateau": {}}, required=wait, waits=wait)
        checkpointer.finish()
        return blocked


class Bare:
    """What one would write without us."""

    def __init__(self, ours: Ours, precision: str, steps: int) -> None:
        from sm_llm.models.families.table import family

        config = ours.setup.config
        self.model = build_on_meta(config)
        self.device = ours.training.strategy.device.torch_device
        materialise(self.model, self.device, self.device, InitialWeights(family(config).tensors(config), 0))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.bf16 = precision == "bf16"
        with ours.training.open_batches(0, {}) as batches:
            self.rows = [torch.from_numpy(next(batches)[0].input_ids).to(self.device) for _ in range(steps)]

    def block(self, steps: int) -> None:
        for number in range(steps):
            ids = self.rows[number]
            with torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext():
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        loss.item()


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds (of all threads)."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def interval(ratios: list[float], draws: int = 10_000) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (draws, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def measure(pairs: int, steps: int, precision: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        ours = Ours(Path(folder), small_task(precision, steps))
        bare = Bare(ours, precision, steps)
        contenders: tuple[Callable[[], None], Callable[[], None]] = (
            lambda: ours.block(steps),
            lambda: bare.block(steps),
        )
        for warm_up in contenders:
            warm_up()
        pairs_taken = []
        for pair in range(pairs):
            order = (0, 1) if pair % 2 else (1, 0)  # who goes first alternates
            taken = {who: timed(contenders[who]) for who in order}
            pairs_taken.append((taken[0], taken[1]))
        saves = []
        for _ in range(pairs):
            ours.block(1)
            waited = ours.save(wait=True)
            ours.block(1)
            saves.append((ours.save(wait=False), waited))
        ours.training.batches.close()
    wall, cpu = ([own[kind] / other[kind] for own, other in pairs_taken] for kind in (0, 1))
    shares = [short / full for short, full in saves]
    return {
        "precision": precision,
        "pairs": pairs,
        "steps_per_block": steps,
        "bare_step_seconds": statistics.median(other[0] for _, other in pairs_taken) / steps,
        "overhead": statistics.median(wall) - 1,
        "overhead_interval": [bound - 1 for bound in interval(wall)],
        "cpu_overhead": statistics.median(cpu) - 1,
        "cpu_overhead_interval": [bound - 1 for bound in interval(cpu)],
        "async_blocked_seconds": statistics.median(short for short, _ in saves),
        "sync_blocked_seconds": statistics.median(full for _, full in saves),
        "async_share_of_sync": statistics.median(shares),
        "async_share_interval": list(interval(shares)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.pairs, options.steps, options.precision)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
