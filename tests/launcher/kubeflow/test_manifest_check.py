"""The closed check of manifests: every single mistake is refused with its path."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.backends.kubeflow.manifest_check import manifest_issues
from tests.launcher.kubeflow.conftest import TINY, job_of, render, tiny

if TYPE_CHECKING:
    from collections.abc import Callable

WORKER = "spec.pytorchReplicaSpecs.Worker"
POD = f"{WORKER}.template.spec"


def worker(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    return found


def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = worker(job)["template"]["spec"]
    return found


def renamed(values: dict[str, Any], old: str, new: str) -> None:
    values[new] = values.pop(old)


ELASTIC = {"minReplicas": 1, "maxReplicas": 2}
MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    # Twelve that a real API server was seen to drop, take or refuse.
    "spec-typo": (
        lambda it: it["spec"].update(elasticPolcy=ELASTIC), "spec.elasticPolcy", "Did you mean elasticPolicy?"
    ),
    "container-typo": (
        lambda it: pod(it)["containers"][0].update(imagee="x"), f"{POD}.containers.0.imagee", "Did you mean image?"
    ),
    "replicas-text": (lambda it: worker(it).update(replicas="2"), f"{WORKER}.replicas", "integer"),
    "env-number": (
        lambda it: pod(it)["containers"][0]["env"].append({"name": "A", "value": 1}),
        f"{POD}.containers.0.env.", "string",
    ),
    "nproc-number": (lambda it: it["spec"].update(nprocPerNode=8), "spec.nprocPerNode", "string"),
    "no-containers": (lambda it: pod(it).pop("containers"), f"{POD}.containers", "is missing"),
    "rdzv-backend": (
        lambda it: it["spec"].update(elasticPolicy={"rdzvBackend": "foo"}), "spec.elasticPolicy.rdzvBackend", "c10d"
    ),
    "restart-policy": (lambda it: worker(it).update(restartPolicy="Sometimes"), f"{WORKER}.restartPolicy", "OnFailure"),
    "container-name": (
        lambda it: pod(it)["containers"][0].update(name="train"), f"{POD}.containers", "has no container pytorch"
    ),
    "replica-type": (
        lambda it: renamed(it["spec"]["pytorchReplicaSpecs"], "Worker", "Workers"),
        "spec.pytorchReplicaSpecs.Workers", "is not a replica type",
    ),
    "name": (lambda it: it["metadata"].update(name="fs_dp"), "metadata.name", "pattern"),
    "gpu-limit": (
        lambda it: pod(it)["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": "4"}),
        f"{POD}.containers.0.resources.limits.nvidia.com/gpu", "must be equal to the request",
    ),
    # The webhook's further rules.
    "two-masters": (
        lambda it: it["spec"]["pytorchReplicaSpecs"]["Master"].update(replicas=2),
        "spec.pytorchReplicaSpecs.Master.replicas", "must be 1",
    ),
    "no-workers": (lambda it: worker(it).update(replicas=0), f"{WORKER}.replicas", "must be at least 1"),
    "elastic-without-workers": (
        lambda it: (it["spec"]["pytorchReplicaSpecs"].pop("Worker"), it["spec"].update(elasticPolicy=ELASTIC)),
        "spec.elasticPolicy", "needs workers",
    ),
    "both-nproc": (
        lambda it: it["spec"].update(elasticPolicy={**ELASTIC, "nProcPerNode": 8}),
        "spec.elasticPolicy.nProcPerNode", "cannot be set beside spec.nprocPerNode",
    ),
    "elastic-bounds": (
        lambda it: it["spec"].update(elasticPolicy={"minReplicas": 3, "maxReplicas": 2}),
        "spec.elasticPolicy.maxReplicas", "must be at least minReplicas",
    ),
    # The API server refuses these in pods, and not in the template of a custom resource.
    "label-value": (lambda it: it["metadata"]["labels"].update(queue="q" * 64), "metadata.labels.queue", "pattern"),
    "node-selector": (
        lambda it: pod(it).update(nodeSelector={"zone": "a b"}), f"{POD}.nodeSelector.zone", "pattern"
    ),
    "selector-key": (lambda it: pod(it).update(nodeSelector={"a b": "x"}), f"{POD}.nodeSelector.a b.", "pattern"),
    "env-name": (
        lambda it: pod(it)["containers"][0]["env"].append({"name": "A=B", "value": ""}),
        f"{POD}.containers.0.env.", "pattern",
    ),
    "container-twice": (
        lambda it: pod(it)["containers"].append({**pod(it)["containers"][0]}),
        f"{POD}.containers.1.name", f"is given already at {POD}.containers.0.name",
    ),
    "container-named-as-an-init-container": (
        lambda it: pod(it)["initContainers"][0].update(name="pytorch"), f"{POD}.containers.0.name", "is given already"
    ),
    "volume-twice": (
        lambda it: pod(it)["volumes"].append({"name": "code", "emptyDir": {}}), f"{POD}.volumes.4.name",
        f"is given already at {POD}.volumes.0.name",
    ),
    "mount-path-twice": (
        lambda it: pod(it)["containers"][0]["volumeMounts"].append({"name": "scratch", "mountPath": "/dev/shm"}),
        f"{POD}.containers.0.volumeMounts.4.mountPath", "is given already",
    ),
    "variable-twice": (
        lambda it: pod(it)["containers"][0]["env"].insert(0, {"name": "PYTHONPATH", "value": "/x"}),
        f"{POD}.containers.0.env.2.name", "is given already",
    ),
    "mount-path-relative": (
        lambda it: pod(it)["containers"][0]["volumeMounts"][0].update(mountPath="code"),
        f"{POD}.containers.0.volumeMounts.0.mountPath", "pattern",
    ),
    "quantity-negative": (
        lambda it: pod(it)["containers"][0].update(resources={"limits": {"cpu": -1}, "requests": {"cpu": 1}}),
        f"{POD}.containers.0.resources.limits.cpu", "must be a quantity of 0 or more",
    ),
    "quantity-negative-text": (
        lambda it: pod(it)["volumes"][3]["emptyDir"].update(sizeLimit="-1Gi"),
        f"{POD}.volumes.3.emptyDir.sizeLimit", "must be a quantity of 0 or more",
    ),
    "device-divided": (
        lambda it: [it.update({"nvidia.com/gpu": "500m"}) for it in pod(it)["containers"][0]["resources"].values()],
        f"{POD}.containers.0.resources.limits.nvidia.com/gpu", "must be a whole number",
    ),
    "free-form": (lambda it: pod(it).update(affinity={"podAfinity": {}}), f"{POD}.affinity", "not a documented field"),
    # Of pods.
    "empty-containers": (lambda it: pod(it).update(containers=[]), f"{POD}.containers", "at least 1"),
    "mount-without-volume": (
        lambda it: pod(it)["volumes"].pop(0), f"{POD}.containers.0.volumeMounts.0.name", "names no volume"
    ),
    "two-sources": (
        lambda it: pod(it)["volumes"][0].update(hostPath={"path": "/x", "type": ""}), f"{POD}.volumes.0", "one source"
    ),
    "volume-typo": (
        lambda it: renamed(pod(it)["volumes"][0], "emptyDir", "emptydir"),
        f"{POD}.volumes.0.emptydir", "emptyDir",
    ),
    "policy": (
        lambda it: it["spec"]["runPolicy"].update(cleanPodPolicy="Never"), "spec.runPolicy.cleanPodPolicy", "All"
    ),
    "kind": (lambda it: it.update(kind="PytorchJob"), "kind", "is not a kind of ours"),
    "version": (lambda it: it.update(apiVersion="kubeflow.org/v2"), "apiVersion", "kubeflow.org/v1"),
}  # fmt: skip


def a_job() -> dict[str, Any]:
    return copy.deepcopy(job_of(render({**TINY, "compute": {"instance_type": "ml.p5.48xlarge", "instance_count": 2}})))


def test_a_right_manifest_has_no_issue() -> None:
    assert manifest_issues(a_job()) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_a_single_mistake_is_refused_with_its_path(name: str) -> None:
    change, path, words = MISTAKES[name]
    job = a_job()
    change(job)
    found = {it.path: str(it) for it in manifest_issues(job)}
    [text] = [text for at, text in found.items() if at == path or (path.endswith(".") and at.startswith(path))]
    assert words in text, text


def test_all_mistakes_are_reported_at_once() -> None:
    job = a_job()
    for name in ("spec-typo", "replicas-text", "nproc-number"):
        MISTAKES[name][0](job)
    assert len(manifest_issues(job)) == 3


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda it: it["spec"]["runPolicy"].update(restartPolicy={}), "spec.runPolicy.restartPolicy.evalPeriodSeconds"),
        (lambda it: it["spec"]["replicaSpecs"][0].update(replica=2), "spec.replicaSpecs.0.replica"),
        (lambda it: it["spec"]["replicaSpecs"][0].update(maxReplicas=1), "spec.replicaSpecs.0.maxReplicas"),
        (lambda it: it["spec"].update(replicaSpecs={}), "spec.replicaSpecs"),
        (lambda it: it["spec"]["runPolicy"].update(backoffLimit=2), "spec.runPolicy.backoffLimit"),
    ],
    ids=["policy", "replica", "maximum", "mapping", "other-operator"],
)
def test_mistakes_in_a_job_of_hyperpods_operator(change: Callable[[dict[str, Any]], Any], path: str) -> None:
    job = copy.deepcopy(job_of(render(tiny(resource="HyperPodPyTorchJob"))))
    assert manifest_issues(job) == []
    change(job)
    assert [it.path for it in manifest_issues(job)] == [path]


def test_a_config_map_that_is_too_large_is_refused() -> None:
    [found, _] = render(TINY).request["manifests"]
    large = {**found, "data": {**found["data"], "more": "é" * (1 << 19)}}
    assert [it.path for it in manifest_issues(large)] == ["data"]
