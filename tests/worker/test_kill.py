"""A run of two pretended nodes, killed with SIGKILL at a random step and started again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from worker_jobs import events, exact_steps, job_file, search_path, train_task

from sm_llm.contract.entrypoint import entrypoint_source
from sm_llm.contract.job_file import JOB_ENVIRONMENT
from sm_llm.contract.run_paths import ContainerPaths, RunPaths
from sm_llm.launcher.processes import reserved_port
from sm_llm.storage.publish import find_final, list_checkpoints
from sm_llm.storage.uri import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 200


@contextmanager
def started(run: Path, attempt: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One torchrun per node, each with its own container folders."""
    task = train_task(max_steps=STEPS, checkpoint={"every_steps": 7}, logging={"every_steps": 1})
    job = job_file(task, run, 1, attempt)
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"compute": two_nodes()})})
    with reserved_port() as port:
        yield [start_node(run, job, node, port) for node in range(2)]


def two_nodes() -> object:
    from sm_llm.spec.compute import ComputeSpec

    return ComputeSpec(instance_count=2, processes_per_instance=1)


def start_node(run: Path, job: object, node: int, port: int) -> subprocess.Popen[bytes]:
    paths = RunPaths(run)
    base = paths.node_dir(job.attempt, node)  # type: ignore[attr-defined]
    script = ContainerPaths(base).code / "train.py"
    script.parent.mkdir(parents=True)
    script.write_text(entrypoint_source("train"))
    job.write(base / "job.json")  # type: ignore[attr-defined]
    environ = {JOB_ENVIRONMENT: str(base / "job.json"), "SAGEMAKER_BASE_DIR": str(base), "PYTHONPATH": search_path()}
    environ["CUDA_VISIBLE_DEVICES"] = str(node)  # NCCL wants a card per process; without GPUs it says nothing
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}"]
    command += ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1"]
    log = (base / "log.txt").open("wb")
    with log:
        return subprocess.Popen(
            [*command, str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the group that is killed: torchrun and its workers
        )


def output(run: Path, attempt: int) -> str:
    return "\n".join(path.read_text() for path in RunPaths(run).attempt_dir(attempt).glob("node-*/log.txt"))


def finish(run: Path, attempt: int) -> None:
    with started(run, attempt) as processes:
        for process in processes:
            assert process.wait(timeout=400) == 0, output(run, attempt)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_CK23_a_killed_run_of_two_nodes_continues_and_equals_an_unbroken_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, 1)
    random.seed()
    step = random.randrange(10, STEPS // 2)
    with started(killed, 1) as processes:
        deadline = time.monotonic() + 300
        while not (events(killed, "checkpoint_published") and any(it["step"] >= step for it in events(killed, "step"))):
            assert time.monotonic() < deadline, output(killed, 1)
            time.sleep(0.01)
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
    finish(killed, 2)
    chosen = events(killed, "start_chosen")
    assert chosen[1]["source"] == "checkpoint", f"killed at step {step}"
    assert chosen[1]["step"] > 0
    assert exact_steps(killed) == exact_steps(whole), f"killed at step {step}"
    assert list(exact_steps(killed)) == list(range(1, STEPS + 1))
    store = open_store(killed)
    assert all(info.valid for info in list_checkpoints(store))
    assert find_final(store, run_id="killed") is not None
