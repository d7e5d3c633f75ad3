"""Nodes and checks of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.launcher.backends.kubeflow import backend as backend_module
from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster
from sm_llm.launcher.backends.kubeflow.setup import check_pod
from sm_llm.launcher.backends.kubeflow.setup.cluster_checks import checks
from sm_llm.launcher.backends.kubeflow.setup.hyperpod import hyperpod_cluster, region_of
from sm_llm.launcher.backends.kubeflow.setup.node_listing import nodes_of
from sm_llm.launcher.tools.clusters import check_cluster, nodes
from sm_llm.spec.backends.kubeflow import KubeflowOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.fixtures.kubernetes_double import KubernetesDouble

HEALTH = "sagemaker.amazonaws.com/node-health-status"
EKS = "arn:aws:eks:us-west-2:111122223333:cluster/team"
OPTIONS = ("backend.image=image:1", "backend.namespace=team")


def node(name: str, gpus: int | None = 8, **fields: Any) -> dict[str, Any]:
    allocatable = {} if gpus is None else {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": "32"}
    conditions = fields.pop("conditions", [{"type": "Ready", "status": "True"}])
    return {
        "metadata": {"name": name, "labels": fields.pop("labels", {})},
        "spec": fields,
        "status": {"allocatable": allocatable, "conditions": conditions},
    }


def pod(on: str, gpus: int, phase: str = "Running") -> dict[str, Any]:
    container = {"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}
    return {"spec": {"nodeName": on, "containers": [container, {}]}, "status": {"phase": phase}}


def test_nodes_with_what_they_have_free_and_what_keeps_pods_away() -> None:
    found = [
        node("n2", labels={HEALTH: "UnschedulablePendingReplacement"}, unschedulable=True, taints=[
            {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
            {"key": "hyperpod", "value": "faulty", "effect": "NoExecute"}]),
        node("n1", labels={HEALTH: "Schedulable"}),
        node("n3", conditions=[{"type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting"},
                               {"type": "DiskPressure", "status": "True"}]),
        node("n4", gpus=None),
    ]  # fmt: skip
    rows = nodes_of(found, [pod("n1", 2), pod("n1", 4, "Succeeded"), pod("n2", 1)])
    assert [(it.name, it.state, it.accelerators, it.free, it.health) for it in rows] == [
        ("n1", "Ready", 8, 6, "Schedulable"),
        ("n2", "Ready,SchedulingDisabled", 8, 0, "UnschedulablePendingReplacement"),
        ("n3", "NotReady", 8, 0, ""),
        ("n4", "Ready", None, None, ""),
    ]
    assert [it.reason for it in rows] == [
        "", "taint hyperpod=faulty:NoExecute", "Kubelet stopped posting; DiskPressure", "",
    ]  # fmt: skip
    assert nodes_of(found, None)[0].free is None, "who may not see pods does not know"


def test_Neuron_devices_that_a_plugin_names_twice_are_counted_once() -> None:
    both = {"aws.amazon.com/neuron": "16", "aws.amazon.com/neurondevice": "16", "aws.amazon.com/neuroncore": "32"}
    row = node("n1")
    row["status"]["allocatable"] = both
    used = {"resources": {"limits": {"aws.amazon.com/neurondevice": "4"}}}
    [found] = nodes_of([row], [{"spec": {"nodeName": "n1", "containers": [used]}, "status": {"phase": "Running"}}])
    assert (found.accelerators, found.free) == (16, 12)


def test_nodes_are_listed_for_a_context(kubernetes: KubernetesDouble) -> None:
    kubernetes.nodes = [node("n1")]
    assert [it.free for it in nodes("kubeflow", "backend.context=double")] == [8]
    kubernetes.forbid(("list", "pods"))
    assert [it.free for it in nodes("kubeflow")] == [None]
    with pytest.raises(SpecError, match=r"backend\.partition"):
        nodes("kubeflow", "backend.partition=p5")


def report(*options: str) -> dict[str, tuple[str, str]]:
    found = check_cluster("kubeflow", *OPTIONS, *options)
    return {it.name: (it.outcome, it.detail) for it in found.checks}


OPERATOR = {"control-plane": "kubeflow-training-operator"}


@pytest.fixture
def team(kubernetes: KubernetesDouble) -> KubernetesDouble:
    """A cluster with all that a job needs."""
    kubernetes.objects |= {
        ("namespaces", "", "team"): {"metadata": {"name": "team"}},
        ("namespaces", "", "other"): {"metadata": {"name": "other"}},
        ("serviceaccounts", "team", "training"): {
            "metadata": {"name": "training", "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/t"}}
        },
        ("persistentvolumeclaims", "team", "fsx"): {"metadata": {"name": "fsx"}, "status": {"phase": "Bound"}},
        ("localqueues", "team", "q"): {"metadata": {"name": "q"}},
    }
    kubernetes.nodes = [node("n1", labels={HEALTH: "Schedulable"})]
    image = "kubeflow/training-operator:v1.8.1"
    template = {"spec": {"containers": [{"image": image}]}}
    kubernetes.deployments = [
        {"metadata": {"name": "mpi-operator"}, "spec": {"template": {"spec": {"containers": [{"image": image[:-1]}]}}}},
        {"metadata": {"name": "training-operator", "labels": OPERATOR}, "spec": {"template": template}},
    ]
    return kubernetes


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_cluster_that_has_all_that_jobs_need(team: KubernetesDouble) -> None:
    import os
    import sys
    from pathlib import Path

    team.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    team.objects["roles", "team", "sm-llm-workflows"] = {"metadata": {"name": "sm-llm-workflows"}, "rules": []}
    found = check_cluster(
        "kubeflow", *OPTIONS, "backend.service_account=training", "backend.queue=q",
        backend={"volumes": [{"claim": "fsx", "path": "/fsx"}]},
    )  # fmt: skip
    assert found.ok
    outcomes = {it.name: it.outcome for it in found.checks}
    assert outcomes.pop("HyperPod") == "skipped"
    assert set(outcomes.values()) == {"ok"}, found.text()
    assert list(outcomes) == [
        "cluster", "namespace", "rights", "operator", "nodes", "device plugin", "EFA plugin", "claim fsx",
        "service account", "queue", "image",
    ]  # fmt: skip
    assert "training operator 1.8.1" in found.text()
    assert all(it.is_deleted for it in team.pods.values()), "the pod that pulled the image is deleted"


def test_what_a_cluster_lacks(team: KubernetesDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_pod, "SECONDS", 20.0)
    team.remove_kinds()
    team.bad_images = {"image:1"}
    team.nodes = [node("n1", gpus=None)]
    team.forbid(("create", "pytorchjobs"), ("get", "pods/log"))
    found = check_cluster(
        "kubeflow", "backend.image=image:1", "backend.namespace=team", "backend.service_account=none",
        "backend.queue=none", backend={"volumes": [{"claim": "other", "path": "/fsx"}]},
    )  # fmt: skip
    text = {it.name: f"{it.outcome}: {it.detail}" for it in found.checks}
    assert not found.ok
    assert text["rights"].startswith("failed: this user may not create pytorchjobs, get pods/log in team")
    assert "Install it: kubectl apply --server-side" in text["operator"]
    assert text["device plugin"].startswith("warning: no node offers nvidia.com/gpu or")
    assert "set backend.efa_per_pod=0" in text["EFA plugin"]
    assert text["claim other"] == "failed: team has none of this name"
    assert text["service account"] == "failed: team has no none"
    assert text["queue"] == "failed: team has no local queue none"
    assert text["image"].startswith("failed: sm-llm-check-")
    assert "its image cannot be pulled" in text["image"]
    assert all(it.is_deleted for it in team.pods.values())


def test_SL27_a_namespace_that_is_not_there_is_answered_with_those_that_are(
    team: KubernetesDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aws/sagemaker-hyperpod-cli#98: jobs start in some namespaces only, and the error did not name them."""
    monkeypatch.setattr(check_pod, "SECONDS", 0.0)
    found = report("backend.namespace=tema")
    assert found["namespace"] == ("failed", "there is no tema. There are: other, team. Set backend.namespace")


def test_who_may_not_make_roles_is_warned_before_a_workflow(
    team: KubernetesDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_pod, "SECONDS", 0.0)
    team.forbid(("create", "roles"))
    assert report()["workflows"][0] == "warning"


def test_SL04_an_operator_that_auto_resume_does_not_work_with(
    team: KubernetesDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """meta-pytorch/torchx#120: a cluster's upgrade broke what depended on a version."""
    monkeypatch.setattr(check_pod, "SECONDS", 0.0)
    team.deployments[1]["spec"]["template"]["spec"]["containers"][0]["image"] = "kubeflow/training-operator:v1.9.0"
    outcome, detail = report("backend.retry=auto-resume")["operator"]
    assert (outcome, "1.7.0, 1.8.0, 1.8.1" in detail) == ("warning", True)
    # The build that HyperPod's Helm chart installs.
    image = "kubeflow/training-operator:v1-855e096"
    team.deployments[1]["spec"]["template"]["spec"]["containers"][0]["image"] = image
    assert report("backend.retry=auto-resume")["operator"] == ("ok", "PyTorchJob, training operator v1-855e096")


def test_a_cluster_that_does_not_answer(kubernetes: KubernetesDouble) -> None:
    kubernetes.fail(*[503] * 9)
    [only] = check_cluster("kubeflow", *OPTIONS).checks
    assert (only.name, only.outcome) == ("cluster", "failed")
    kubernetes.fail()


class HyperPod:
    """boto3's client of SageMaker: a cluster of Slurm, then one of EKS, on two pages."""

    def get_paginator(self, name: str) -> HyperPod:
        assert name == "list_clusters"
        return self

    def paginate(self) -> list[dict[str, Any]]:
        return [{"ClusterSummaries": [{"ClusterName": name}]} for name in ("slurm", "null", "eks")]

    def describe_cluster(self, *, ClusterName: str) -> Mapping[str, Any]:
        found: dict[str, Any] = {"ClusterName": ClusterName, "ClusterStatus": "InService", "NodeRecovery": "None"}
        orchestrators = {"null": None, "eks": {"Eks": {"ClusterArn": EKS}}}
        return found | ({"Orchestrator": orchestrators[ClusterName]} if ClusterName in orchestrators else {})


def test_DL28_a_cluster_of_Slurm_in_the_account_breaks_nothing() -> None:
    """aws/sagemaker-hyperpod-cli#264: its record has no orchestrator, and every command for EKS failed."""
    found = hyperpod_cluster(HyperPod(), EKS)
    assert found is not None
    assert found["ClusterName"] == "eks"
    assert hyperpod_cluster(HyperPod(), f"{EKS}-other") is None
    assert (region_of(EKS), region_of("double")) == ("us-west-2", None)


def test_auto_resume_without_node_recovery(team: KubernetesDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_pod, "SECONDS", 0.0)
    connect = backend_module._cluster(None).connect
    options = KubeflowOptions(image="image:1", namespace="team", retry="auto-resume", node_health="schedulable")
    found = {
        it.name: it for it in checks(options, KubernetesCluster(EKS, connect), lambda _: None, lambda _: HyperPod())
    }
    assert found["HyperPod"].outcome == "warning"
    assert found["HyperPod"].detail == "eks is InService, node recovery None; auto-resume needs Automatic"


def test_SL28_the_checks_take_the_options_of_jobs(team: KubernetesDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """aws/sagemaker-hyperpod-cli#352: options of task governance were missing in one of two commands."""
    monkeypatch.setattr(check_pod, "SECONDS", 0.0)
    found = report("backend.queue=q", "backend.priority=high", "backend.topology=topology.k8s.aws/ultraserver-id")
    assert found["queue"] == ("ok", "")
    assert found["priority"] == ("failed", "there is no priority class high")
