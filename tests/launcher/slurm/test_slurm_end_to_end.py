"""Tiny trainings on a real Slurm cluster of four virtual nodes, through the public verbs."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState
from tests.fixtures.s3_server import KEY, SECRET

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.slurm import SlurmCluster, SlurmOverSsh

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SECONDS = 300
"""A start imports torch on every node; on a busy machine that takes a minute."""
STEPS = 120


def spec(folder: Path, backend: Mapping[str, Any] = {}, **fields: Any) -> dict[str, Any]:
    """A tiny training on two nodes, in this very environment."""
    (folder / "scratch").mkdir(exist_ok=True)
    options = {
        "name": "slurm",
        "shared_folder": str(folder),
        "virtual_environment": sys.prefix,
        "scratch_folder": str(folder / "scratch"),
        "stop_seconds": 3.0,
    }
    task = {
        "kind": "train",
        "model": {"preset": "tiny", "config": {"vocab_size": 300, "num_hidden_layers": 2}},
        "data": {"format": "synthetic", "seq_length": 128, "rows": 2_000},
        "max_steps": STEPS,
        "checkpoint": {"every_steps": 3},
        "logging": {"every_steps": 1},
    }
    return {
        "name": "tiny",
        "task": task,
        "compute": {"instance_count": 2, "processes_per_instance": 1},
        "backend": options | dict(backend),
        "storage": str(folder / "runs"),
        "environment": {"OMP_NUM_THREADS": "1"},
        **fields,
    }


def losses(run: Run) -> dict[int, tuple[str, str]]:
    return {row["step"]: (row["loss"].hex(), row["grad_norm"].hex()) for row in run.metrics()}


def await_step(slurm: SlurmCluster, run: Run, step: int) -> None:
    """Wait until a checkpoint of ``step`` or a later one is committed."""
    slurm.await_state(lambda: any(it.step >= step for it in run.checkpoints()), SECONDS)


def job_of(run: Run) -> str:
    return run.attempts[-1].native_id.rpartition("/")[2]


def restarts(slurm: SlurmCluster, run: Run) -> int:
    found = slurm.run("squeue", "-h", "-t", "all", "-j", job_of(run), "-O", "RestartCnt")
    return int(found.strip())


def assert_recovered(run: Run, killed_at: float) -> None:
    """One recovery is reported, that from the kill, with all of its parts."""
    events = list(read_events(run.events))
    [found] = [it for it in events if it["kind"] == "recovered"]
    assert found["time"] - found["seconds"] == pytest.approx(killed_at, abs=30)
    parts = ("detection", "requeue", "start", "restore", "first_step")
    assert all(found[f"{it}_seconds"] is not None and found[f"{it}_seconds"] >= 0 for it in parts)
    assert sum(found[f"{it}_seconds"] for it in parts) == pytest.approx(found["seconds"])
    assert found["requeue_seconds"] >= 5, "REQUEUE_WAIT of the cluster"
    assert "after the last sign of life (detection" in str(run.status().progress.recovery)
    yielded, lost = [it for it in events if it["kind"] == "checkpoint_restored"]
    assert lost["local_bytes"] > 0.3 * (lost["local_bytes"] + lost["fetched_bytes"]), "of the node that stays"
    assert yielded["fetched_bytes"] < 0.1 * yielded["local_bytes"], "both nodes had their parts"


def test_an_unfit_node_is_left_out_when_the_job_is_requeued(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('trained')\n")
    task = {"kind": "script", "source": str(tmp_path / "code"), "entry": "train.py"}
    bad = slurm.run("sinfo", "-h", "-N", "-o", "%N").split()[0]
    with slurm.read_only(bad, tmp_path / "scratch"):
        run = sm_llm.launch(spec(tmp_path, task=task))
        slurm.await_state(lambda: restarts(slurm, run) == 1 and run.state is RunState.RUNNING, SECONDS)
        assert bad not in slurm.nodes_of(job_of(run))
        assert f"ExcNodeList={bad}" in slurm.run("scontrol", "show", "job", job_of(run))
        slurm.run("scancel", job_of(run))  # the rest is the same as without a bad node
        slurm.await_state(lambda: run.state.is_final, SECONDS)
    assert any(f"node {bad} is unfit" in line for line in run.logs())


def test_time_limit_and_a_lost_node_change_no_loss(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec(tmp_path, {"time_limit_minutes": 60})
    run = sm_llm.launch(job)
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(run.logs(follow=True)), daemon=True)
    follower.start()

    await_step(slurm, run, 3)
    slurm.run("scancel", "--batch", "--signal=USR1", job_of(run))  # as Slurm does before the limit
    slurm.await_state(lambda: restarts(slurm, run) == 1, SECONDS)
    yielded = max(it.step for it in run.checkpoints())
    assert run.state in (RunState.RESTARTING, RunState.RUNNING)
    assert not any(it.ended for it in run.attempts)

    await_step(slurm, run, yielded + 6)
    # The node of rank 0: the other one must keep its rank, and read its own part from its disk.
    lost, stays = slurm.nodes_of(job_of(run))
    killed_at = time.time()
    slurm.kill(lost)
    try:
        slurm.await_state(lambda: restarts(slurm, run) == 2, SECONDS)
        assert run.wait() is RunState.COMPLETED
        assert lost not in slurm.nodes_of(job_of(run))
    finally:
        slurm.start(lost)
    follower.join(60)
    assert not follower.is_alive()
    for restart in range(3):
        assert any(f"job {job_of(run)}, restart {restart}: node 0 of 2" in line for line in lines)
    assert any(f"step {STEPS}/{STEPS}" in line for line in lines)

    order = next((tmp_path / "jobs").glob("*/nodes")).read_text().split(",")
    assert order[1] == stays
    assert_recovered(run, killed_at)
    left = [it for it in (tmp_path / "scratch").rglob("*.distcp") if f"node-{lost}" not in it.parts]
    assert not left, "a run that is done leaves no checkpoints on its nodes"

    unbroken = sm_llm.launch({**job, "backend": {"name": "local"}, "storage": str(tmp_path / "local")}, wait=True)
    assert losses(run) == losses(unbroken)
    assert len(losses(run)) == STEPS


def test_stop_and_scancel_over_ssh_in_S3(
    slurm_over_ssh: SlurmOverSsh, tmp_path: Path, bucket: str, s3_server: Any
) -> None:
    slurm = slurm_over_ssh.cluster
    credentials = tmp_path / "credentials"
    credentials.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    variables = {"AWS_SHARED_CREDENTIALS_FILE": str(credentials)}
    job = spec(
        tmp_path,
        {"ssh_host": slurm_over_ssh.host},
        storage=f"s3://{bucket}/runs",
        storage_options={"endpoint_url": s3_server.endpoint, "region": "us-east-1"},
        environment={"OMP_NUM_THREADS": "1", **variables},
    )
    run = sm_llm.launch(job)
    await_step(slurm, run, 3)
    assert run.stop(wait=True) is RunState.INTERRUPTED
    stopped = max(it.step for it in run.checkpoints())
    assert run.attempts[0].reason == (
        f"stopped after step {stopped} (the stop file); the checkpoint of step {stopped} is safe"
    )

    again = sm_llm.launch(job)
    assert (again.id, again.continued_attempt) == (run.id, 2)
    await_step(slurm, again, stopped + 3)
    slurm.run("scancel", job_of(again))
    slurm.await_state(lambda: again.state is RunState.INTERRUPTED, SECONDS)

    last = sm_llm.launch(job)
    assert last.wait() is RunState.COMPLETED
    assert [it.state for it in last.attempts] == [RunState.INTERRUPTED, RunState.INTERRUPTED, RunState.COMPLETED]
    assert len(losses(last)) == STEPS
    assert any("restart 0: node 1 of 2" in line for line in last.logs())
