"""States of a job from its conditions and pods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.kubeflow.states import condition_of, native_state, node_of
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Mapping


def job(*types: str, message: str = "", reason: str = "") -> dict[str, Any]:
    """A job whose last condition holds; those before it no longer do."""
    conditions = [{"type": it, "status": "False"} for it in types[:-1]]
    conditions += [{"type": it, "status": "True", "message": message, "reason": reason} for it in types[-1:]]
    return {"spec": {}, "status": {"conditions": conditions}}


def pod(name: str = "x-master-0", phase: str = "Running", **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


def container(state: dict[str, Any], restarts: int = 0, last: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [{"name": "pytorch", "state": state, "restartCount": restarts, "lastState": {"terminated": last or {}}}]


def unexplained(held: Mapping[str, Any]) -> list[dict[str, Any]]:
    """No controller has reported anything."""
    return []


CRASHED = {"exitCode": 1, "message": "a\nsm_llm: pod 0 ends with code 1: rank 0: out of memory\n", "finishedAt": "2"}


@pytest.mark.parametrize(
    ("found", "pods", "state", "words"),
    [
        (job(), [], RunState.PENDING, "the operator has not seen the job yet"),
        (job("Created"), [], RunState.PENDING, "its pods are being created (no quota left)"),
        (job("Created", "Suspended"), [], RunState.PENDING, "waiting for quota: the queue has not admitted the job"),
        (job("Created", "Running"), [pod(), pod("x-worker-0")], RunState.RUNNING, "running in 2 pods"),
        (job("Created", "Running"), [pod(), pod("x-worker-0", "Pending")], RunState.PENDING, "1 running, 1 pending"),
        (job("Created", "Running", "Restarting", message="1 pod failed"), [pod()], RunState.RESTARTING, "1 pod failed"),
        (job("Created", "Running", "Succeeded"), [pod(phase="Succeeded")], RunState.COMPLETED, ""),
        (job("Running", "Failed", reason="DeadlineExceeded"), [pod()], RunState.INTERRUPTED, "time_limit_minutes"),
        (job("Running", "Failed", message="job failed"), [], RunState.FAILED, "job failed"),
        (job("BrandNew", message="what"), [], RunState.UNKNOWN, "BrandNew: what"),
        (job("Created"), [pod(phase="Pending", conditions=[
            {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}])],
         RunState.PENDING, "waiting for nodes: x-master-0: 0/4 nodes are available"),
        (job("Created"), [pod(phase="Pending", containerStatuses=container(
            {"waiting": {"reason": "ErrImagePull", "message": "not found"}}))],
         RunState.PENDING, "its image cannot be pulled: ErrImagePull (not found). Check backend.image"),
        (job("Created"), [pod(phase="Pending", containerStatuses=container(
            {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hub" not found'}}))],
         RunState.PENDING, 'cannot be configured: CreateContainerConfigError (secret "hub" not found)'),
        (job("Running"), [pod(containerStatuses=container({"waiting": {"reason": "CrashLoopBackOff"}}, 3, CRASHED))],
         RunState.RESTARTING, "exit code 1: sm_llm: pod 0 ends with code 1: rank 0: out of memory; started again 3"),
        (job("Running"), [pod(initContainerStatuses=container({"waiting": {"reason": "CrashLoopBackOff"}}, 1, {
            "exitCode": 1, "message": "sm_llm: cannot fetch the code bundle"}))],
         RunState.RESTARTING, "cannot fetch the code bundle"),
        (job("Running"), [pod(containerStatuses=container(
            {"waiting": {"reason": "CrashLoopBackOff"}}, 1, {"exitCode": 137, "reason": "OOMKilled"}))],
         RunState.RESTARTING, "its memory was used up (OOMKilled). Raise backend.memory_gib_per_pod"),
        (job("Created"), [pod(phase="Pending", conditions=[
            {"type": "PodScheduled", "status": "False",
             "message": "0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims"}])],
         RunState.PENDING, "waiting for a volume: x-master-0: 0/4 nodes are available: pod has unbound immediate"),
        (job("Running"), [pod(), pod("x-worker-0", "Failed", reason="Evicted", message="low on ephemeral-storage")],
         RunState.RESTARTING, "x-worker-0: Evicted: low on ephemeral-storage"),
        (job("Running"), [pod(conditions=[{"type": "DisruptionTarget", "status": "True",
                                           "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}])],
         RunState.RESTARTING, "x-master-0: EvictionByEvictionAPI: Eviction API: evicting"),
        (job("Running", "Failed", message="job failed"), [pod("x-worker-0", "Failed", reason="Evicted"), pod(
            "x-master-0", "Failed", containerStatuses=container({"terminated": {"exitCode": 75, "finishedAt": "1"}}))],
         RunState.FAILED, "x-worker-0: Evicted: no message"),
    ],
    ids=[
        "unseen", "no-pods", "suspended", "running", "partly", "restarting", "succeeded", "deadline", "failed",
        "unknown", "unschedulable", "image", "secret", "crash", "init", "memory", "volume", "evicted", "disrupted",
        "evicted-first",
    ],
)  # fmt: skip
def test_a_state_and_why(found: dict[str, Any], pods: list[dict[str, Any]], state: RunState, words: str) -> None:
    native = native_state(found, pods, lambda _: [{"message": "older"}, {"message": "no quota left"}])
    assert native.state is state
    assert words in native.detail


def test_SL21_the_first_pod_that_ended_is_the_cause_and_what_still_runs_is_named() -> None:
    """kubeflow/trainer#1579: the job had failed, and a pod was still running."""
    later = {"exitCode": 75, "message": "pod 1 is lost", "finishedAt": "3"}
    pods = [
        pod("x-master-0", containerStatuses=container({"running": {}}, 1, later)),
        pod("x-worker-0", "Failed", containerStatuses=container({"terminated": CRASHED})),
    ]
    native = native_state(job("Running", "Failed", message="job failed"), pods, unexplained)
    assert native.detail == (
        "x-worker-0: exit code 1: sm_llm: pod 0 ends with code 1: rank 0: out of memory; still there: x-master-0"
    )


def test_the_condition_that_holds_is_the_last_one_with_status_true() -> None:
    found = job("Created", "Running")
    found["status"]["conditions"][0]["status"] = "True"
    assert condition_of(found) == found["status"]["conditions"][1]
    assert condition_of({}) is None


def test_pods_are_numbered_as_ranks_are() -> None:
    numbers = {"a-b-master-0": 0, "a-worker-0": 1, "a-worker-11": 12, "a-pods-3": 3, "other": None}
    assert {name: node_of(pod(name)) for name in numbers} == numbers


def test_SL17_a_condition_that_is_not_known_is_shown_raw() -> None:
    native = native_state(job("Created", "Rescheduling", message="moved"), [pod()], unexplained)
    assert (native.state, native.detail) == (RunState.UNKNOWN, "Rescheduling: moved")


def test_SL22_SL25_the_job_decides_whether_it_is_done_not_its_pods_or_their_logs() -> None:
    """kubeflow/trainer#1504: a pod ran on; awsome-distributed-ai#1033: the agent printed an error at a clean end."""
    printed = {"exitCode": 1, "message": "CancelledError\n", "finishedAt": "1"}
    pods = [pod(), pod("x-worker-0", "Failed", containerStatuses=container({"terminated": printed}))]
    assert native_state(job("Running", "Succeeded"), pods, unexplained).state is RunState.COMPLETED
    done = [pod(phase="Succeeded"), pod("x-worker-0", "Succeeded")]
    assert native_state(job("Created", "Running"), done, unexplained).state is RunState.RUNNING


def test_what_a_pod_with_a_node_waits_for_is_in_its_events() -> None:
    """A volume that cannot be mounted leaves neither a condition nor a reason of the container."""
    mount = {"type": "Warning", "message": "MountVolume.SetUp failed for volume fsx"}
    events = {"x-worker-0": [mount, {"type": "Normal", "message": "Pulled"}]}
    pods = [
        pod(),
        pod("x-worker-0", "Pending", containerStatuses=container({"waiting": {"reason": "PodInitializing"}})),
    ]
    native = native_state(job("Created", "Running"), pods, lambda it: events[it["metadata"]["name"]])
    assert native.state is RunState.PENDING
    assert native.detail == "of 2 pods 1 running, 1 pending; x-worker-0 (MountVolume.SetUp failed for volume fsx)"
