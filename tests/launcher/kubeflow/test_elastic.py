"""Trainings whose number of pods changes: what is decided, and that no loss changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.manifest_check import manifest_issues
from sm_llm.launcher.backends.kubeflow.states import native_state, node_of
from sm_llm.runs.run_states import RunState
from tests.launcher.kubeflow.conftest import TINY, job_of, pod_of, render, tiny
from tests.launcher.kubeflow.test_jobs import TRAINING, await_, spec
from tests.launcher.kubeflow.test_states import job, pod, unexplained

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.kubernetes_double import KubernetesDouble

STEPS = 240
STREAM = {"format": "stream", "dataset": "allenai/c4", "config_name": "en", "seq_length": 64}


def elastic(pods: int, **fields: Any) -> dict[str, Any]:
    options = {"min_pods": 1, **fields.pop("backend", {})}
    return {**tiny(**options), "compute": {"instance_count": pods, "processes_per_instance": 2}, **fields}


def test_a_training_that_continues_with_fewer_pods_has_workers_alone_and_no_etcd() -> None:
    submission = render(elastic(4, task={**TINY["task"], "global_batch_size": 16}))
    found = job_of(submission)["spec"]
    assert found["elasticPolicy"] == {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": 4}
    assert list(found["pytorchReplicaSpecs"]) == ["Worker"]
    assert pod_of(submission, "Worker")["containers"][0]["args"] == ["torchrun", "4", "2", "train.py", "1,2,4", "120"]
    assert [manifest_issues(it) for it in submission.request["manifests"]] == [[], []]


def test_the_global_batch_is_that_of_all_pods() -> None:
    submission = render(elastic(2, backend={"min_pods_wait_seconds": 7}))
    assert submission.job.spec.task.global_batch_size == 4  # type: ignore[union-attr]
    assert pod_of(submission, "Worker")["containers"][0]["args"][-2:] == ["1,2", "7"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": {**TINY["task"], "data": STREAM}}, "backend.min_pods.*: does not go with streamed data"),
        ({"backend": {"min_pods": 2}}, "backend.min_pods.*: must be less than compute.instance_count, which is 2"),
        ({"backend": {"retry": "none"}}, "backend.min_pods.*: needs pods that start again"),
        ({"backend": {"resource": "HyperPodPyTorchJob"}}, "backend.min_pods.*: is of trainings in PyTorchJobs"),
        ({"backend": {"min_pods": None, "min_pods_wait_seconds": 5}}, "has no effect without backend.min_pods"),
    ],
    ids=["stream", "all", "no-restarts", "hyperpod", "wait"],
)
def test_what_cannot_continue_with_fewer_pods_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((PlanError, SpecError), match=message):
        sm_llm.plan(elastic(2, **fields))


def test_a_number_of_pods_that_does_not_divide_the_batch_is_refused_with_those_that_do() -> None:
    task = {**TINY["task"], "global_batch_size": 8}
    with pytest.raises(PlanError, match=r"does not divide the global batch of 8 sequences.*Numbers of pods that do: 4"):
        sm_llm.plan(elastic(4, task=task, backend={"min_pods": 3}))


def test_the_state_of_a_job_that_continues_with_fewer_pods() -> None:
    found = {**job("Created", "Running"), "spec": {"elasticPolicy": {"minReplicas": 1}}}
    waits = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}
    pods = [pod("x-worker-0"), pod("x-worker-1", "Pending", conditions=[waits])]
    native = native_state(found, pods, unexplained)
    assert native.state is RunState.RUNNING
    assert native.detail == "of 2 pods 1 running, 1 pending; waiting for nodes: x-worker-1: 0/4 nodes are available"
    assert (
        native_state({**found, "spec": {"elasticPolicy": {"minReplicas": 2}}}, pods, unexplained).state
        is RunState.PENDING
    )
    labelled = pod("x-worker-0")
    labelled["metadata"]["labels"] = {names.ELASTIC_LABEL: "true"}
    assert node_of(labelled) == 0


def newest(run: Run) -> int:
    return max((it.step for it in run.checkpoints() if it.valid), default=0)


def losses(run: Run) -> list[float]:
    rows = run.metrics()
    assert [it["step"] for it in rows] == list(range(1, STEPS + 1))
    return [it["loss"] for it in rows]


@pytest.mark.integration
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("mounted_claim")
def test_two_pods_one_pod_two_pods_and_the_same_losses(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    # In bf16, which is chosen where the CPU has it, the order of a sum changes more than 1e-5.
    task = {**TRAINING, "max_steps": STEPS, "checkpoint": {"every_steps": 3}, "precision": {"compute": "fp32"}}
    source = spec(
        tmp_path,
        task=task,
        compute={"instance_count": 2, "processes_per_instance": 1},
        environment={"OMP_NUM_THREADS": "1"},
        backend={"min_pods": 1, "min_pods_wait_seconds": 2, "stop_seconds": 60},
    )
    run = sm_llm.launch(source)
    name = names.object_name(run.id)

    def begun(pods: int) -> int:
        return sum(f"--- pod 0 of {pods} is" in line for line in run.logs())

    await_(lambda: begun(1) + begun(2) >= 1 and newest(run) > 0)
    # A pod may be slow to come: the first start has one or two.
    await_(lambda: begun(2) >= 1)
    before = newest(run)
    await_(lambda: newest(run) > before)
    ready_kubernetes.scale(name, 1)
    alone = begun(1)
    await_(lambda: begun(1) > alone and len(ready_kubernetes.pods) == 1)
    before = newest(run)
    await_(lambda: newest(run) > before)
    assert run.state is RunState.RUNNING
    together = begun(2)
    ready_kubernetes.scale(name, 2)
    assert run.wait() is RunState.COMPLETED
    assert begun(2) > together, "the pod that came back took part"
    assert len(run.attempts) == 1

    unsaved = {**task, "checkpoint": {"every_steps": STEPS}}
    local = {**source, "task": unsaved, "backend": {"name": "local"}, "storage": str(tmp_path / "local")}
    unbroken = sm_llm.launch(local, wait=True)
    assert losses(run) == pytest.approx(losses(unbroken), abs=1e-5, rel=0)


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("mounted_claim")
def test_a_pod_that_is_evicted_does_not_end_the_run(ready_kubernetes: KubernetesDouble, tmp_path: Path) -> None:
    """All processes stop together when one is asked to; the operator took that for success."""
    task = {**TRAINING, "max_steps": 150, "checkpoint": {"every_steps": 5}}
    compute = {"instance_count": 2, "processes_per_instance": 1}
    run = sm_llm.launch(spec(tmp_path, task=task, compute=compute, environment={"OMP_NUM_THREADS": "1"}))
    await_(lambda: newest(run) > 0)
    ready_kubernetes.evict(f"{names.object_name(run.id)}-worker-0")
    assert run.wait() is RunState.COMPLETED
    assert [it["step"] for it in run.metrics()] == list(range(1, 151))
    assert len(run.attempts) == 1
