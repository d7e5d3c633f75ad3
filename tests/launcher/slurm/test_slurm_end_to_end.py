"""Tiny trainings on a real Slurm cluster of four virtual nodes, through the public verbs."""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import RunState
from tests.fixtures.s3_server import KEY, SECRET
from tests.fixtures.slurm import stand_in_image
from tests.fixtures.wheels import wheel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.run import Run
    from tests.fixtures.slurm import SlurmCluster, SlurmOverSsh

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

SECONDS = 300
"""A start imports torch on every node; on a busy machine that takes a minute."""
STEPS = 160


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
    """Wait until a checkpoint of ``step`` or a later one is committed; fails once the run has ended without it."""
    polls = itertools.count()

    def is_committed() -> bool:
        assert next(polls) % 50 or not run.state.is_final, run.status().reason
        return any(it.step >= step for it in run.checkpoints())

    slurm.await_state(is_committed, SECONDS)


def job_of(run: Run) -> str:
    return run.attempts[-1].native_id.rpartition("/")[2]


def restarts(slurm: SlurmCluster, run: Run) -> int:
    found = slurm.run("squeue", "-h", "-t", "all", "-j", job_of(run), "-O", "RestartCnt")
    return int(found.strip())


def newest(run: Run) -> int:
    """The step of the newest commit."""
    return max(it.step for it in run.checkpoints())


def events_of(run: Run, kind: str) -> list[dict[str, Any]]:
    run.metrics()  # brings the events of a run in S3 here
    return [dict(it) for it in read_events(run.events) if it["kind"] == kind]


def reach_time_limit(slurm: SlurmCluster, run: Run, folder: Path) -> int:
    """Let Slurm's time limit come; the step of the newest commit once the job is requeued."""
    before = restarts(slurm, run)
    job = job_of(run)
    slurm.reach_time_limit(job, lambda: any(folder.glob(f"jobs/*/attempt-*/yield-{before}")))
    slurm.await_state(lambda: restarts(slurm, run) == before + 1, SECONDS)
    # Slurm keeps the limit that came for the next start.
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    assert run.state in (RunState.RESTARTING, RunState.RUNNING)
    assert not run.attempts[-1].ended
    return newest(run)


def followed(run: Run) -> tuple[threading.Thread, list[str]]:
    """A thread that follows the logs of a run, and the lines that it has seen."""
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(run.logs(follow=True)), daemon=True)
    follower.start()
    return follower, lines


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
        # Slurm counts the restart while the old start is still ending.
        slurm.await_state(
            lambda: (
                restarts(slurm, run) == 1 and run.state is RunState.RUNNING and bad not in slurm.nodes_of(job_of(run))
            ),
            SECONDS,
        )
        assert f"ExcNodeList={bad}" in slurm.run("scontrol", "show", "job", job_of(run))
        slurm.run("scancel", job_of(run))  # the rest is the same as without a bad node
        slurm.await_state(lambda: run.state.is_final, SECONDS)
    assert any(f"node {bad} is unfit" in line for line in run.logs())


def test_a_node_that_does_not_see_the_shared_folder_is_named_and_left_out(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It cannot leave a file there: what it prints is in the log of the job."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('trained')\n")
    (shared := tmp_path / "apart").mkdir()
    task = {"kind": "script", "source": str(tmp_path / "code"), "entry": "train.py"}
    bad = slurm.run("sinfo", "-h", "-N", "-o", "%N").split()[1]
    with slurm.read_only(bad, shared):
        run = sm_llm.launch(spec(tmp_path, {"shared_folder": str(shared)}, task=task))
        # Nodes are excluded just after the job is queued again.
        slurm.await_state(lambda: f"ExcNodeList={bad}" in slurm.run("scontrol", "show", "job", job_of(run)), SECONDS)
        slurm.run("scancel", job_of(run))
        slurm.await_state(lambda: run.state.is_final, SECONDS)
    left = next(shared.glob("jobs/*/attempt-1/failure-0-0")).read_text()
    assert left.startswith(f"node {bad}: ")
    assert left.endswith("is not there: the shared folder is not mounted on this node\n")


def test_time_limit_a_lost_node_and_scancel_change_no_loss(slurm: SlurmCluster, tmp_path: Path) -> None:
    """On two nodes, in a virtual environment."""
    job = spec(tmp_path, {"time_limit_minutes": 60, "signal_seconds": 60})
    run = sm_llm.launch(job)
    follower, lines = followed(run)

    await_step(slurm, run, 3)
    saved = [reach_time_limit(slurm, run, tmp_path)]

    await_step(slurm, run, saved[0] + 6)
    # The node of rank 0: the other one must keep its rank, and read its own part from its disk.
    lost, stays = slurm.nodes_of(job_of(run))
    killed_at = time.time()
    slurm.kill(lost)
    try:
        slurm.await_state(lambda: restarts(slurm, run) == 2, SECONDS)
        saved.append(newest(run))
        await_step(slurm, run, saved[1] + 6)
        assert lost not in slurm.nodes_of(job_of(run))
    finally:
        slurm.start(lost)
    order = next((tmp_path / "jobs").glob("*/nodes")).read_text().split(",")
    assert order[1] == stays
    assert_recovered(run, killed_at)

    slurm.run("scancel", job_of(run))
    slurm.await_state(lambda: run.state is RunState.INTERRUPTED, SECONDS)
    saved.append(newest(run))
    follower.join(60)
    assert not follower.is_alive()
    for restart in range(3):
        assert any(f"job {job_of(run)}, restart {restart}: node 0 of 2" in line for line in lines)
    assert "[job] sm_llm: the time limit is near" in lines
    assert any(line.startswith("[job] ---") and f"job {job_of(run)}, restart 2" in line for line in lines)

    again = sm_llm.launch(job)
    assert (again.id, again.continued_attempt) == (run.id, 2)
    assert again.wait() is RunState.COMPLETED
    assert [it["step"] for it in events_of(again, "checkpoint_restored")] == saved
    for node in slurm.nodes_of(job_of(again)):
        left = [it for it in (tmp_path / "scratch").rglob("*.distcp") if f"node-{node}" in it.parts]
        assert not left, "a run that is done leaves no checkpoints on its nodes"

    unbroken = sm_llm.launch({**job, "backend": {"name": "local"}, "storage": str(tmp_path / "local")}, wait=True)
    assert losses(again) == losses(unbroken)
    assert len(losses(again)) == STEPS


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a container in which a package of the lock is missing, which all nodes install once."""
    for name in ("shared", "scratch"):
        (tmp_path / name).mkdir()
    lock = f"{wheel(tmp_path / 'shared')}\n"
    monkeypatch.setattr("sm_llm.launcher.backends.slurm.render.lock_text", lambda stack: lock)
    # The nodes' /tmp, with a short path: sockets lie there.
    with tempfile.TemporaryDirectory(prefix="sm") as disk:
        yield {
            "virtual_environment": None,
            "shared_folder": str(tmp_path / "shared"),
            "scratch_folder": str(tmp_path / "scratch"),
            "container_image": stand_in_image(tmp_path / "image.sqsh"),
            "container_mounts": [disk],
            "disk": disk,
        }
        [installed] = Path(disk).glob("*/packages-*/tinystock*.py")
        assert installed.is_file()


def test_limit_lost_nodes_and_a_stop_over_ssh_in_containers_change_no_loss(
    slurm_over_ssh: SlurmOverSsh, tmp_path: Path, bucket: str, s3_server: Any, container: dict[str, Any]
) -> None:
    """On four nodes of HyperPod, with the stand-ins of its options, the run in S3."""
    slurm, shared = slurm_over_ssh.cluster, tmp_path / "shared"
    credentials = shared / "credentials"
    credentials.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    variables = {"AWS_SHARED_CREDENTIALS_FILE": str(credentials), "TMPDIR": container.pop("disk")}
    requeued = {**container, "ssh_host": slurm_over_ssh.host, "time_limit_minutes": 60, "signal_seconds": 60}
    job = spec(
        tmp_path,
        requeued,
        compute={"instance_count": 4, "processes_per_instance": 1},
        storage=f"s3://{bucket}/runs",
        storage_options={"endpoint_url": s3_server.endpoint, "region": "us-east-1"},
        environment={"OMP_NUM_THREADS": "1", **variables},
    )
    run = sm_llm.launch(job)
    follower, lines = followed(run)
    await_step(slurm, run, 3)
    saved = [reach_time_limit(slurm, run, shared)]

    await_step(slurm, run, saved[0] + 3)
    lost = slurm.nodes_of(job_of(run))[1]
    slurm.kill(lost)
    try:
        slurm.await_state(lambda: restarts(slurm, run) == 2, SECONDS)
        saved.append(newest(run))
        await_step(slurm, run, saved[1] + 3)
        assert lost not in slurm.nodes_of(job_of(run))
        assert run.stop(wait=True) is RunState.INTERRUPTED
    finally:
        slurm.start(lost)
    saved.append(newest(run))
    assert run.attempts[0].reason == (
        f"stopped after step {saved[2]} (the stop file); the checkpoint of step {saved[2]} is safe"
    )
    follower.join(60)
    assert not follower.is_alive()
    for restart in range(3):
        assert any(f"job {job_of(run)}, restart {restart}: node 3 of 4" in line for line in lines)

    resumed = {**container, "ssh_host": slurm_over_ssh.host, "retry": "auto-resume"}
    again = sm_llm.launch({**job, "backend": spec(tmp_path, resumed)["backend"]})
    assert (again.id, again.continued_attempt) == (run.id, 2)
    follower, lines = followed(again)
    await_step(slurm, again, saved[2] + 3)
    replaced = slurm.nodes_of(job_of(again))[2]
    slurm.kill(replaced)
    for folder in (tmp_path / "scratch").glob(f"*/*/node-{replaced}"):
        shutil.rmtree(folder)
    slurm.start(replaced)  # before Slurm notices: HyperPod's new machine has the name of the old one
    saved.append(newest(again))
    assert again.wait() is RunState.COMPLETED
    assert restarts(slurm, again) == 0, "the step was started again, not the job"
    follower.join(60)
    assert sum(f"job {job_of(again)}, restart 0: node 0 of 4" in line for line in lines) == 2

    restored = events_of(again, "checkpoint_restored")
    assert [it["step"] for it in restored] == saved
    for it in (restored[1], restored[3]):
        share = it["fetched_bytes"] / (it["local_bytes"] + it["fetched_bytes"])
        assert 0.1 < share < 0.5, "the part of the node that was replaced, one of four"
    assert len(events_of(again, "recovered")) == 2

    local = {"name": "local"}
    plain = {**job, "backend": local, "storage": str(tmp_path / "local"), "environment": {"OMP_NUM_THREADS": "1"}}
    unbroken = sm_llm.launch({**plain, "storage_options": {}}, wait=True)
    assert losses(again) == losses(unbroken)
    assert len(losses(again)) == STEPS
