"""Tiny trainings in pods of the contract double, which run our worker as processes; runs in SeaweedFS."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.launcher.backends.kubeflow.names import object_name
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.launcher.run import Run
    from tests.fixtures.kubernetes_double import KubernetesDouble
    from tests.fixtures.s3_server import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SECONDS = 300
"""A start imports torch in every pod; on a busy machine that takes a minute."""
STEPS = 40


@pytest.fixture
def pods(kubernetes: KubernetesDouble, bucket: str) -> KubernetesDouble:
    """The cluster, whose pods have this environment's Python and credentials for S3."""
    kubernetes.environ |= {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    kubernetes.environ["PATH"] = f"{Path(sys.executable).parent}:{kubernetes.environ['PATH']}"
    return kubernetes


def spec(bucket: str, s3_server: S3Server, **fields: Any) -> dict[str, Any]:
    """A tiny training in two pods."""
    return {
        "name": "tiny",
        "task": {
            "kind": "train",
            "model": {"preset": "tiny", "config": {"vocab_size": 300, "num_hidden_layers": 2}},
            "data": {"format": "synthetic", "seq_length": 128, "rows": 2_000},
            "max_steps": STEPS,
            "checkpoint": {"every_steps": 3},
            "logging": {"every_steps": 1},
        },
        "compute": {"instance_count": 2, "processes_per_instance": 1},
        "backend": {"name": "kubeflow", "image": "image:1", "namespace": "team", "stop_seconds": 5},
        "storage": f"s3://{bucket}/runs",
        "storage_options": {"endpoint_url": s3_server.endpoint, "region": "us-east-1"},
        "environment": {"OMP_NUM_THREADS": "1"},
        **fields,
    }


def await_(is_reached: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def await_step(run: Run, step: int) -> None:
    """Wait until a checkpoint of ``step`` or a later one is committed."""
    await_(lambda: any(it.step >= step for it in run.checkpoints()))


def losses(run: Run) -> dict[int, tuple[str, str]]:
    return {row["step"]: (row["loss"].hex(), row["grad_norm"].hex()) for row in run.metrics()}


def test_a_killed_pod_changes_no_loss(pods: KubernetesDouble, bucket: str, s3_server: S3Server, tmp_path: Path) -> None:
    job = spec(bucket, s3_server)
    run = sm_llm.launch(job)
    lines: list[str] = []
    follower = threading.Thread(target=lambda: lines.extend(run.logs(follow=True)), daemon=True)
    follower.start()
    await_step(run, 3)
    worker = f"{object_name(run.id)}-worker-0"
    pods.kill(worker)
    assert run.wait() is RunState.COMPLETED
    follower.join(60)
    assert not follower.is_alive()
    for node in range(2):
        # Without a label where it is read before the other pod has a log.
        assert sum(f"--- pod {node} of 2" in line for line in lines) == 2, "both pods started again"
    assert any(f"step {STEPS}/{STEPS}" in line for line in lines)
    assert len(run.attempts) == 1

    unbroken = sm_llm.launch({**job, "backend": {"name": "local"}, "storage": str(tmp_path / "local")}, wait=True)
    assert losses(run) == losses(unbroken)
    assert len(losses(run)) == STEPS
