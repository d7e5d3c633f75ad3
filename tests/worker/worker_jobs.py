"""Runs whole training jobs in this process: the folders, job.json and environment that a launcher would make."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sm_llm.contract.job_file import JOB_ENVIRONMENT, JobFile
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_paths import RunPaths
from sm_llm.spec.job import JobSpec

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
STEPS = 10
SAVE_EVERY = 3
REPOSITORY = Path(__file__).parents[2]


def search_path() -> str:
    """PYTHONPATH of child processes: this checkout before everything else."""
    return os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])


def train_task(**changes: Any) -> dict[str, Any]:
    """A small fp32 job: 8 sequences of 32 random tokens a step, 10 steps, both saves and validations on the way."""
    task: dict[str, Any] = {
        "kind": "train",
        "model": {"preset": "tiny", "config": MODEL},
        "data": {"format": "synthetic", "seq_length": 32, "rows": 48, "validation_rows": 10},
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "max_steps": STEPS,
        "optim": {"learning_rate": 3e-3, "warmup_steps": 2, "min_learning_rate": 3e-4},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every_steps": SAVE_EVERY},
        "validation": {"every_steps": 5},
        "logging": {"every_steps": 4},
        "deterministic": True,  # for GPUs; the CPU's kernels are
    }
    for name, change in changes.items():
        merged = isinstance(change, dict) and isinstance(task.get(name), dict) and "format" not in change
        task[name] = {**task[name], **change} if merged else change
    return task


def job_file(task: dict[str, Any], run: Path, world_size: int, attempt: int = 1) -> JobFile:
    """job.json of ``task`` with its run folder at ``run``."""
    compute = {"processes_per_instance": world_size}
    spec = JobSpec.model_validate({"name": "test", "task": task, "compute": compute}, strict=False)
    return JobFile(run_id=run.name, attempt=attempt, run_uri=str(run), spec=spec, spec_digest="digest")


def job_environment(job: JobFile) -> dict[str, str]:
    """Write job.json (on the leader) and return the environment the worker reads."""
    paths = RunPaths(Path(job.run_uri))
    base = paths.node_dir(job.attempt, 0)
    base.mkdir(parents=True, exist_ok=True)
    path = base / "job.json"
    if os.environ.get("RANK", "0") == "0":
        job.write(path)
    return {**os.environ, JOB_ENVIRONMENT: str(path), "SAGEMAKER_BASE_DIR": str(base)}


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    """Events of one kind, as written."""
    return [event for event in read_events(RunPaths(run).events) if event["kind"] == kind]


def losses(run: Path) -> dict[int, float]:
    """Loss of every step; the newest attempt's counts."""
    return {event["step"]: event["loss"] for event in events(run, "step")}


def exact_steps(run: Path) -> dict[int, tuple[str, str, str]]:
    """(loss, gradient norm, learning rate) of every step, bit for bit."""
    names = ("loss", "grad_norm", "learning_rate")
    return {event["step"]: tuple(float(event[n]).hex() for n in names) for event in events(run, "step")}  # type: ignore[misc]


def result_folder(run: Path) -> Path:
    """The folder of a run's published result."""
    commit = json.loads((run / "ckpt" / "commits" / "final.json").read_text())
    return run / "final" / str(commit["save"]["save_id"]) / "data"
