"""The driver of a workflow: which jobs it creates, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from sm_llm.worker.kubeflow.start_steps import (
    DONE,
    ENDED,
    RUNNING,
    STOPPED,
    WAITING,
    Api,
    ApiSilent,
    StepJob,
    advance,
)


@dataclass
class Cluster:
    """What the API server answers."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    """Job -> message that its container has left."""
    refuses: int = 0
    is_silent: bool = False

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        if self.is_silent:
            raise ApiSilent("refused")
        if "/pods?" in path:
            message = self.messages.get(path.rpartition("%3D")[2], "")
            state = {"terminated": {"message": message, "exitCode": 0}}
            return 200, {"items": [{"status": {"containerStatuses": [{"state": state}]}}]}
        if method == "GET":
            name = path.rpartition("/")[2]
            return (200, self.jobs[name]) if name in self.jobs else (404, {})
        if self.refuses:
            return self.refuses, {"message": "quota"}
        name = body["metadata"]["name"]
        if name in self.jobs:
            return 409, {"message": "exists"}
        self.jobs[name] = {**body, "status": {"conditions": []}}
        return 201, self.jobs[name]

    def end(self, name: str, condition: str = "Succeeded") -> None:
        self.jobs[name]["status"]["conditions"] = [
            {"type": "Running", "status": "False"},
            {"type": condition, "status": "True"},
        ]


def step(name: str, *after: str, attempt: int = 1) -> StepJob:
    annotations = {"sm-llm/run": f"s3://b/{name}", "sm-llm/attempt": str(attempt)}
    metadata = {"name": name, "namespace": "team", "annotations": annotations}
    return StepJob(
        {"name": name, "after": list(after)},
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata},
    )


def run(steps: list[StepJob], cluster: Cluster) -> list[str]:
    advance(steps, cast("Api", cluster))
    return [it.state for it in steps]


def test_each_step_begins_once_those_before_it_are_done() -> None:
    cluster, steps = Cluster(), [step("a"), step("b"), step("c", "a", "b")]
    assert run(steps, cluster) == [RUNNING, RUNNING, WAITING]
    cluster.end("b")
    assert run(steps, cluster) == [RUNNING, DONE, WAITING]
    cluster.end("a", "Completed")
    assert run(steps, cluster) == [DONE, DONE, RUNNING]
    assert list(cluster.jobs) == ["a", "b", "c"]


@pytest.mark.parametrize("end", ["failed", "deleted", "stopped"])
def test_what_waits_for_a_step_that_did_not_finish_never_begins(end: str) -> None:
    cluster, steps = Cluster(), [step("a"), step("b", "a"), step("c", "b"), step("d")]
    run(steps, cluster)
    if end == "deleted":
        del cluster.jobs["a"]
    else:
        cluster.end("a", "Failed" if end == "failed" else "Succeeded")
    cluster.messages["a"] = f"{STOPPED} in order" if end == "stopped" else ""
    assert run(steps, cluster) == [ENDED, ENDED, ENDED, RUNNING]
    assert not {"b", "c"} & set(cluster.jobs)


def test_a_driver_that_is_started_again_finds_its_jobs() -> None:
    cluster = Cluster()
    run([step("a"), step("b", "a")], cluster)
    cluster.end("a")
    again = [step("a"), step("b", "a")]
    assert run(again, cluster) == [RUNNING, WAITING]
    assert run(again, cluster) == [DONE, RUNNING]
    assert list(cluster.jobs) == ["a", "b"]


def test_a_job_of_another_attempt_is_not_taken_for_its_own() -> None:
    cluster = Cluster()
    run([step("a")], cluster)
    with pytest.raises(SystemExit, match="step a: there is another job a"):
        run([step("a", attempt=2)], cluster)


def test_a_job_that_the_cluster_refuses_ends_the_driver() -> None:
    with pytest.raises(SystemExit, match="step a: the cluster refused its job: quota"):
        run([step("a")], Cluster(refuses=403))


def test_a_cluster_that_does_not_answer_changes_nothing() -> None:
    cluster, steps = Cluster(), [step("a")]
    run(steps, cluster)
    cluster.is_silent = True
    with pytest.raises(ApiSilent):
        run(steps, cluster)
    assert steps[0].state == RUNNING
