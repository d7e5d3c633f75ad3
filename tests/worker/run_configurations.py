"""Runs many training jobs in one torchrun launch; ``torchrun … run_configurations.py FOLDER``, results in FOLDER.

Every process runs every configuration. Rank 0 writes results.json: what tests cannot read from the run folders.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import resume_configurations
from worker_jobs import SAVE_EVERY, STEPS, job_environment, job_file, result_folder, train_task

from sm_llm.worker.main import main
from sm_llm.worker.strategies.fsdp import mesh as fsdp_mesh
from sm_llm.worker.strategies.fsdp.strategy import FsdpStrategy
from sm_llm.worker.tasks import train as train_module


class Broken(Exception):
    """Stands for a crash in the middle of a run."""


class Harness:
    """Runs jobs below one folder and collects what their run folders do not hold.

    Jobs of equal shape share one mesh. DTensor keeps results of operations under meshes that compare equal: with a mesh
    per job it would mix process groups of an earlier job with this one's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = dist.get_world_size()
        self.results: dict[str, Any] = {}
        fsdp_mesh.init_device_mesh = functools.cache(fsdp_mesh.init_device_mesh)

    def close(self) -> None:
        """Write what was collected to ``results.json``, and leave with the others."""
        if dist.get_rank() == 0:
            (self.folder / "results.json").write_text(json.dumps(self.results))
        dist.barrier()
        dist.destroy_process_group()

    def run(
        self,
        name: str,
        task: dict[str, Any],
        *,
        attempt: int = 1,
        break_at: int | None = None,
        resume: int | str | None = None,
        fails: bool = False,
    ) -> None:
        """One attempt; ``break_at`` raises before that step is taken. Notes which rows every step has seen."""
        run = self.folder / name
        dist.barrier()
        job = job_file(task, run, self.world, attempt).model_copy(update={"resume": resume})
        environ = job_environment(job)
        dist.barrier()
        original = train_module.Trainer.take_step
        rows: dict[int, list[int]] = {}

        def take_step(training: train_module.Trainer, step: int, batches: Any) -> None:
            if step == break_at:
                training.checkpointer.finish()
                raise Broken(f"step {step}")
            if step % SAVE_EVERY == 0 or step == STEPS:
                training.checkpointer.finish()  # of saves that wait, a newer one would replace an older one
            rows[step] = [zlib.crc32(row.tobytes()) for batch in batches for row in batch.input_ids]
            original(training, step, batches)

        train_module.Trainer.take_step = take_step  # type: ignore[method-assign]
        try:
            code = main("train", environ)
        finally:
            train_module.Trainer.take_step = original  # type: ignore[method-assign]
        self.note_samples(name, rows)
        assert code == (1 if fails or break_at is not None else 0), f"{name}: exit code {code}"

    def note_samples(self, name: str, rows: dict[int, list[int]]) -> None:
        """Which rows all processes together have seen at every step."""
        of_ranks: list[Any] = [None] * self.world
        dist.all_gather_object(of_ranks, rows)
        samples = self.results.setdefault("samples", {}).setdefault(name, {})
        samples |= {step: sorted(row for seen in of_ranks for row in seen.get(step, ())) for step in rows}


class SpyStrategy(FsdpStrategy):
    """Keeps hashes of the initial parameters and notes shards that are equal on two ranks."""

    hashes: dict[str, str]
    equal_shards: list[str]

    def build(self, config: Any, weights: Any) -> None:
        super().build(config, weights)
        type(self).hashes, type(self).equal_shards = {}, []
        for name, parameter in self._parameters.items():
            whole = parameter.detach()
            if hasattr(whole, "full_tensor"):
                locals_: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(locals_, _hash(whole.to_local()))
                if len(set(locals_)) < len(locals_) and parameter.dim() > 1:
                    self.equal_shards.append(name)
                whole = whole.full_tensor()
            self.hashes[name] = _hash(whole)


class ShardedAlone(FsdpStrategy):
    """FSDP2 even on one process, to compare with the bare model."""

    def setup(self) -> None:
        super().setup()
        self._meshes = fsdp_mesh.make_meshes(self.device.type, self.layout)


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).hexdigest()


def with_strategy(strategy: type[FsdpStrategy], action: Any) -> None:
    """Run ``action`` with another strategy class."""
    original = train_module.make_strategy
    train_module.make_strategy = lambda task, process, device: strategy(task, process, device)  # type: ignore[assignment]
    try:
        action()
    finally:
        train_module.make_strategy = original


def common(harness: Harness) -> None:
    """What every world size runs."""
    with_strategy(SpyStrategy, lambda: harness.run("base", train_task()))
    harness.results["initial"] = SpyStrategy.hashes
    harness.results["equal_shards"] = SpyStrategy.equal_shards
    padded = {"format": "json_rows", "seq_length": 32, "train": str(harness.folder.parent / "padded"), "shuffle": True}
    harness.run("padded", train_task(data=padded, max_steps=4))
    harness.run("half", train_task(), break_at=7)


def one(harness: Harness) -> None:
    """On a single process."""
    harness.run("wide", train_task(micro_batch_size=4, global_batch_size=4, max_steps=4))
    harness.run("accumulated", train_task(micro_batch_size=1, global_batch_size=4, max_steps=4))
    bf16 = train_task(precision={"compute": "bf16"})
    harness.run("bf16", bf16)
    with_strategy(ShardedAlone, lambda: harness.run("bf16-sharded", bf16))
    harness.run("bf16-master", train_task(precision={"compute": "bf16", "master": "bf16"}))
    rounded = train_task(precision={"compute": "bf16", "moments": "bf16"})
    harness.run("bf16-moments", rounded)
    harness.run("bf16-moments-broken", rounded, break_at=5)
    harness.run("bf16-moments-broken", rounded, attempt=2)
    harness.run("bf16-broken", bf16, break_at=5)
    harness.run("bf16-broken", bf16, attempt=2)
    fp8 = train_task(precision={"compute": "fp8"})
    harness.run("fp8", fp8)
    harness.run("fp8-broken", fp8, break_at=5)
    harness.run("fp8-broken", fp8, attempt=2)
    harness.run(
        "plateau", train_task(optim={"schedule": "plateau", "plateau_patience": 0}, validation={"every_steps": 2})
    )
    harness.run("synchronous", train_task(checkpoint={"every_steps": 3, "async_save": False}))


def two(harness: Harness) -> None:
    """On two processes."""
    recompute = {"activation_checkpointing": "full", "reshard_after_forward": False}
    harness.run("recompute", train_task(parallelism=recompute))
    harness.run("bf16", train_task(precision={"compute": "bf16"}))
    harness.run("fp8", train_task(precision={"compute": "fp8"}))
    untied = train_task()
    untied["model"] = {**untied["model"], "config": {**untied["model"]["config"], "tie_word_embeddings": False}}
    harness.run("untied", untied)
    branch = {"checkpoint": f"{harness.folder / 'half'}@3"}
    harness.run("branch", train_task(start=branch))
    start = {"pretrained": str(result_folder(harness.folder / "untied"))}
    fields = {"start": start, "model": {"preset": None, "config": {}}, "max_steps": 2}
    harness.run("pretrained", train_task(**fields))
    harness.run("pretrained-split", train_task(parallelism={"tensor_parallel_degree": 2}, **fields))


def continue_other_world(harness: Harness) -> None:
    """Take up, with this world size, what another one began (the test's fixture copied it here)."""
    for run in sorted(harness.folder.glob("from-*/half")):
        harness.run(str(run.relative_to(harness.folder)), train_task(), attempt=2)


def run_all(folder: Path) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    harness = Harness(folder)
    common(harness)
    {1: one, 2: two}.get(harness.world, lambda _: None)(harness)
    continue_other_world(harness)
    resume_configurations.of_world(harness)
    harness.close()


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
