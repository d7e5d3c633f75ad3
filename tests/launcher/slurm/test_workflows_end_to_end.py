"""Workflows on a real Slurm cluster: that for Trainium, whose runs are in S3, and one that is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState
from tests.fixtures.s3_server import KEY, SECRET
from tests.launcher.slurm.test_slurm_end_to_end import SECONDS, await_step, job_of, spec

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run
    from tests.fixtures.hub_double import Hub
    from tests.fixtures.slurm import SlurmCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

DOUBLE = Path(__file__).parents[2] / "fixtures" / "nxd_double"
STEPS = 200


def events_of(run: Run, kind: str) -> list[dict[str, Any]]:
    run.metrics()  # brings the events of a run in S3 here
    return [dict(it) for it in read_events(run.events) if it["kind"] == kind]


def trainium(folder: Path, hub: Hub) -> dict[str, Any]:
    """Steps of the recipes for Trainium: weights to shards, graphs, a training on shards, and the weights back."""
    task = {
        "kind": "train",
        "model": {"preset": None},
        "start": {"pretrained": "steps.convert.output"},
        "data": {"format": "rows", "train": "steps.prepare.output/train", "seq_length": 32},
        "parallelism": {
            "strategy": "nxd", "tensor_parallel_degree": 2, "flash_attention": False, "result": "nxd",
        },
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "max_steps": 6,
        "checkpoint": {"every_steps": 3},
        "logging": {"every_steps": 1},
    }  # fmt: skip
    prepare = {"kind": "prepare", "sources": [str(folder / "text.txt")], "seq_length": 32}
    two = {"processes_per_instance": 2}
    return {
        "model": {
            "task": {"kind": "fetch", "source": "hf://org/tiny@main"},
            "environment": {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"},
        },
        "prepare": {"task": {**prepare, "train_tokenizer": {"vocab_size": 300}}},
        "convert": {
            "task": {"kind": "convert", "source": "steps.model.output", "to": "nxd", "tensor_parallel_degree": 2}
        },
        "precompile": {"task": {"kind": "precompile", "training": task, "extract_steps": 2}, "compute": two},
        "train": {"task": task, "compute": two, "after": ["precompile"]},
        "back": {"task": {"kind": "convert", "source": "steps.train.output", "to": "hf", "verify": True}},
    }


def test_the_workflow_for_trainium_with_its_run_in_S3(
    slurm: SlurmCluster, tmp_path: Path, bucket: str, s3_server: Any, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not at the top: every process of the default suite imports this file, and has no test in it.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=304, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "initial")
    hub.add("org/tiny", {it.name: it.read_bytes() for it in (tmp_path / "initial").iterdir()})
    (tmp_path / "text.txt").write_text("\n".join(f"{it} plus {it} makes {2 * it}." for it in range(400)))
    (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("PATH", os.pathsep.join([str(DOUBLE / "bin"), os.environ["PATH"]]))
    job = spec(
        tmp_path,
        storage=f"s3://{bucket}/runs",
        storage_options={"endpoint_url": s3_server.endpoint, "region": "us-east-1"},
        environment={
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(DOUBLE),
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
        },
        compute={"processes_per_instance": 1},
    )
    del job["task"]
    run = sm_llm.launch({**job, "name": "trainium", "steps": trainium(tmp_path, hub)})
    slurm.await_state(lambda: run.state.is_final, 4 * SECONDS)
    assert run.state is RunState.COMPLETED, run.status().reason
    assert [len(it.attempts) for it in run.steps.values()] == [1] * 6
    assert sorted(run.steps["train"].metrics(), key=lambda it: it["step"])[-1]["step"] == 6
    # Graphs go from the node of one job to that of another through the store.
    graphs = events_of(run.steps["train"], "graphs_compiled")[-1]
    assert (graphs["compiled"], graphs["hit_rate"]) == (0, 1.0)
    listed = s3_server.client.list_objects_v2(Bucket=bucket, Prefix="runs/")["Contents"]
    names = {it["Key"] for it in listed}
    assert any(it.startswith("runs/neuron-compile-cache/sdk-") for it in names)
    back = str(run.steps["back"].result).removeprefix(f"s3://{bucket}/")
    assert {f"{back}/config.json", f"{back}/model.safetensors"} <= names


def stopped_flow(folder: Path) -> dict[str, Any]:
    """A training, and a program that reads what it has published."""
    (folder / "program").mkdir(exist_ok=True)
    (folder / "program" / "report.sh").write_text('ls "$SM_CHANNEL_MODEL"\n')
    job = spec(folder, compute={"processes_per_instance": 1})
    train = {**job.pop("task"), "max_steps": STEPS, "checkpoint": {"every_steps": 10}}
    report = {"kind": "script", "entry": "report.sh", "source": str(folder / "program")}
    steps = {
        "train": {"task": train},
        "report": {"task": report, "inputs": {"model": "steps.train.output"}},
    }
    return {**job, "name": "stopped", "steps": steps}


def test_a_running_workflow_is_stopped_and_the_same_fit_continues_it(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = stopped_flow(tmp_path)
    run = sm_llm.launch(job)
    train, report = run.steps["train"], run.steps["report"]
    await_step(slurm, train, 10)
    assert report.state is RunState.PENDING
    run.stop()
    slurm.await_state(lambda: run.state.is_final, SECONDS)
    assert (run.state, train.state, report.state) == (
        RunState.INTERRUPTED, RunState.INTERRUPTED, RunState.STOPPED,
    )  # fmt: skip
    assert "step train: stopped after step" in str(run.status().reason)
    assert slurm.run("squeue", "-h", "-j", f"{job_of(train)},{job_of(report)}") == "", "no job of it is left"
    saved = max(it.step for it in train.checkpoints())

    again = sm_llm.launch(job)
    assert (again.id, again.continued_attempt) == (run.id, 2)
    slurm.await_state(lambda: again.state.is_final, SECONDS)
    assert again.state is RunState.COMPLETED, again.status().reason
    assert [it.state for it in again.steps["train"].attempts] == [RunState.INTERRUPTED, RunState.COMPLETED]
    assert [it.state for it in again.steps["report"].attempts] == [RunState.STOPPED, RunState.COMPLETED]
    [restored] = events_of(again.steps["train"], "checkpoint_restored")
    assert restored["step"] == saved
    assert len(again.steps["train"].metrics()) == STEPS
    assert any("model.safetensors" in line for line in again.steps["report"].logs())
