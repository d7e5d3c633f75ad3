"""Checks a cluster before the first job: rights, operator, plugins, claims, accounts, queue and the image."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import PlanError, SubmitError
from sm_llm.launcher.backend import ClusterCheck
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.cluster import Refused
from sm_llm.launcher.backends.kubeflow.setup.check_pod import image_check
from sm_llm.launcher.backends.kubeflow.setup.hyperpod import hyperpod_cluster, region_of
from sm_llm.launcher.backends.kubeflow.setup.node_listing import DEVICES, devices_of
from sm_llm.launcher.backends.kubeflow.submit import INSTALL
from sm_llm.launcher.images.image_build import pull_policy
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster
    from sm_llm.spec.backends.kubeflow import KubeflowOptions

_EFA = "vpc.amazonaws.com/efa"
_ROLE = "eks.amazonaws.com/role-arn"
# HyperPod's Helm chart installs a build between releases, with the tag v1-855e096.
_OPERATOR = re.compile(r"training-operator:(v(?=[0-9]+\.))?(?P<version>[\w.-]+)")
_RELEASE = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_AUTO_RESUME = ("1.7.0", "1.8.0", "1.8.1")
"""Releases of the training operator that HyperPod's auto-resume works with, by AWS's page on jobs by kubectl."""
_IN_ECR = re.compile(r"[0-9]{12}\.dkr\.ecr\.")
_MOST_NAMED = 10
_PLUGINS = (
    "Install the plugin: kubectl apply -f https://raw.githubusercontent.com/NVIDIA/k8s-device-plugin/main/deployments/"
    "static/nvidia-device-plugin.yml, or Neuron's"
)


def checks(
    options: KubeflowOptions, cluster: KubernetesCluster, tell: Callable[[str], None], client: Callable[[str], Any]
) -> Iterator[ClusterCheck]:
    """One check after the other; where the cluster does not answer, the first is the last.

    ``client`` makes boto3's client of SageMaker for a region.
    """
    try:
        # This path needs no right: what fails here is the connection or the login, not a role.
        version = cluster.read("/version") or {}
    except SubmitError as error:
        yield ClusterCheck("cluster", "failed", str(error))
        return
    yield ClusterCheck("cluster", "ok", f"{cluster.name}, Kubernetes {version.get('gitVersion', 'of unknown version')}")
    for check in (_namespace, _rights, _operator, _nodes, _claims, _accounts, _queue):
        try:
            yield from check(options, cluster)
        except SubmitError as error:
            yield ClusterCheck(check.__name__.strip("_"), "skipped", str(error))
    yield from _hyperpod(options, cluster, client)
    if _IN_ECR.match(options.image):
        try:
            policy = pull_policy(options.image)
        except PlanError as error:
            yield ClusterCheck("image in ECR", "failed", str(error))
        else:
            detail = "the role of the nodes needs the policy below to pull it; that cannot be checked from here"
            yield ClusterCheck("image in ECR", "warning", detail, policy)
    yield image_check(options, cluster, tell)


def _namespace(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    if cluster.exists(f"/api/v1/namespaces/{options.namespace}") is not False:
        yield ClusterCheck("namespace", "ok", options.namespace)
        return
    found = _listed(cluster, "/api/v1/namespaces")
    known = ", ".join(sorted(str(it["metadata"]["name"]) for it in found or ())[:_MOST_NAMED])
    detail = f"there is no {options.namespace}{f'. There are: {known}' if known else ''}. Set backend.namespace"
    yield ClusterCheck("namespace", "failed", detail)


def _rights(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    group, plural = cluster.resource(options.resource)
    wanted = [
        *((verb, group, plural) for verb in ("create", "get", "delete")),
        *((verb, "", "configmaps") for verb in ("create", "get", "update", "patch")),
        ("list", "", "pods"),
        ("get", "", "pods/log"),
    ]
    lacking = [f"{verb} {what}" for verb, of, what in wanted if not cluster.may(options.namespace, verb, of, what)]
    if lacking:
        detail = f"this user may not {', '.join(lacking)} in {options.namespace}. Ask for a role there"
        yield ClusterCheck("rights", "failed", detail)
        return
    yield ClusterCheck("rights", "ok", "jobs, their files, pods and logs")
    # The first workflow of a namespace creates the role, which later ones find: only then the right is needed.
    ready = cluster.exists(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{options.namespace}/roles/{names.DRIVER}")
    if not ready and not cluster.may(options.namespace, "create", "rbac.authorization.k8s.io", "roles"):
        detail = f"the role {names.DRIVER} is not there, and this user may create none: workflows cannot run"
        yield ClusterCheck("workflows", "warning", detail)


def _operator(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    if not cluster.has_kind(options.resource, options.namespace):
        detail = f"the cluster has no {options.resource}. Install it: {INSTALL[options.resource]}"
        yield ClusterCheck("operator", "failed", detail)
        return
    version = _operator_version(cluster) if options.resource == "PyTorchJob" else None
    found = f"{options.resource}{f', training operator {version}' if version else ', version not visible'}"
    if options.retry == "auto-resume" and _RELEASE.fullmatch(version or "") and version not in _AUTO_RESUME:
        detail = f"{found}: HyperPod's auto-resume works with {', '.join(_AUTO_RESUME)}. Use backend.retry=operator"
        yield ClusterCheck("operator", "warning", detail)
    else:
        yield ClusterCheck("operator", "ok", found)


def _operator_version(cluster: KubernetesCluster) -> str | None:
    # The resource definition does not name the operator's release; the image of its deployment does.
    found = _listed(cluster, "/apis/apps/v1/deployments", {"labelSelector": "control-plane=kubeflow-training-operator"})
    for it in found or ():
        for container in it["spec"]["template"]["spec"]["containers"]:
            if match := _OPERATOR.search(str(container.get("image"))):
                return match["version"]
    return None


def _nodes(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    nodes = _listed(cluster, "/api/v1/nodes")
    if nodes is None:
        yield ClusterCheck("nodes", "skipped", "this user may not list nodes")
        return
    chosen = [it for it in nodes if _selected(it, options)]
    if not chosen:
        detail = f"none of {counted(len(nodes), 'node')} has the labels of backend.node_selector and node_health"
        yield ClusterCheck("nodes", "failed", detail)
        return
    yield ClusterCheck("nodes", "ok", f"{len(chosen)} of {len(nodes)} can be chosen")
    resource = options.accelerator_resource
    names_ = DEVICES if resource is None else (resource,)
    having = [it for it in chosen if any(_offers(it, name) for name in names_)]
    detail = f"on {counted(len(having), 'node')}: {', '.join(sorted({str(devices_of(it)) for it in having}))} each"
    if having:
        yield ClusterCheck("device plugin", "ok", detail)
    else:
        yield ClusterCheck("device plugin", "warning", f"no node offers {' or '.join(names_)}. {_PLUGINS}")
    if not any(_offers(it, _EFA) for it in chosen):
        detail = f"no node offers {_EFA}: set backend.efa_per_pod=0, or install aws-efa-k8s-device-plugin"
        yield ClusterCheck("EFA plugin", "warning", detail)
    else:
        yield ClusterCheck("EFA plugin", "ok")


def _selected(node: Mapping[str, Any], options: KubeflowOptions) -> bool:
    labels = node["metadata"].get("labels") or {}
    wanted = dict(options.node_selector)
    if options.node_health != "any":
        wanted[names.HEALTH_LABEL] = "Schedulable"
    if options.node_health == "deep-checked":
        wanted[names.DEEP_CHECK_LABEL] = "Passed"
    return all(labels.get(name) == value for name, value in wanted.items())


def _offers(node: Mapping[str, Any], resource: str) -> bool:
    # Allocatable and not capacity: a device that its plugin finds unhealthy is missing from the former alone.
    return str(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0")) != "0"


def _claims(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    for it in options.volumes:
        found = cluster.read(f"/api/v1/namespaces/{options.namespace}/persistentvolumeclaims/{it.claim}")
        name = f"claim {it.claim}"
        if found is None:
            yield ClusterCheck(name, "failed", f"{options.namespace} has none of this name")
            continue
        phase = str((found.get("status") or {}).get("phase"))
        if phase == "Bound":
            yield ClusterCheck(name, "ok", "bound")
        else:
            detail = f"it is {phase}: pods wait for it, unless its storage class binds it with the first pod"
            yield ClusterCheck(name, "warning" if phase == "Pending" else "failed", detail)


def _accounts(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    path = f"/api/v1/namespaces/{options.namespace}"
    for secret in options.image_pull_secrets:
        is_there = cluster.exists(f"{path}/secrets/{secret}")
        if is_there is not None:
            yield ClusterCheck(
                f"secret {secret}", "ok" if is_there else "failed", "" if is_there else "it is not there"
            )
    if options.service_account is None:
        detail = "backend.service_account is not set: pods reach S3 with the role of their node"
        yield ClusterCheck("service account", "warning", detail)
        return
    found = cluster.read(f"{path}/serviceaccounts/{options.service_account}")
    if found is None:
        yield ClusterCheck("service account", "failed", f"{options.namespace} has no {options.service_account}")
    elif role := (found["metadata"].get("annotations") or {}).get(_ROLE):
        yield ClusterCheck("service account", "ok", f"{options.service_account}, with {role}")
    else:
        detail = f"{options.service_account} names no role ({_ROLE}): it needs an association of EKS Pod Identity"
        yield ClusterCheck("service account", "warning", detail)


def _queue(options: KubeflowOptions, cluster: KubernetesCluster) -> Iterator[ClusterCheck]:
    if options.queue is None:
        return
    kueue = "/apis/kueue.x-k8s.io/v1beta1"
    found = cluster.read(f"{kueue}/namespaces/{options.namespace}/localqueues/{options.queue}")
    if found is None:
        yield ClusterCheck("queue", "failed", f"{options.namespace} has no local queue {options.queue}")
        return
    active = next((it for it in _conditions(found) if it.get("type") == "Active"), {})
    # Kueue writes False where the cluster queue is missing or stopped.
    is_active = active.get("status") != "False"
    yield ClusterCheck("queue", "ok" if is_active else "failed", "" if is_active else str(active.get("message")))
    if options.priority is not None and not cluster.exists(f"{kueue}/workloadpriorityclasses/{options.priority}"):
        yield ClusterCheck("priority", "failed", f"there is no priority class {options.priority}")


def _conditions(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return list((found.get("status") or {}).get("conditions") or ())


def _hyperpod(
    options: KubeflowOptions, cluster: KubernetesCluster, client: Callable[[str], Any]
) -> Iterator[ClusterCheck]:
    region = region_of(cluster.name)
    if region is None:
        yield ClusterCheck("HyperPod", "skipped", "the context is not named by a cluster of EKS")
        return
    try:
        found = hyperpod_cluster(client(region), cluster.name)
    except Exception as error:  # of boto3, which this module does not import to name
        yield ClusterCheck("HyperPod", "skipped", f"it could not be asked: {error}")
        return
    if found is None:
        needs = options.retry == "auto-resume" or options.node_health != "any"
        yield ClusterCheck("HyperPod", "failed" if needs else "ok", "no: it manages no nodes of this cluster")
        return
    recovery = str(found.get("NodeRecovery"))
    detail = f"{found.get('ClusterName')} is {found.get('ClusterStatus')}, node recovery {recovery}"
    # Without it a faulty node is only marked, and the job that waits for another waits for ever.
    bad = options.retry == "auto-resume" and recovery != "Automatic"
    yield ClusterCheck(
        "HyperPod", "warning" if bad else "ok", f"{detail}{'; auto-resume needs Automatic' if bad else ''}"
    )


def _listed(
    cluster: KubernetesCluster, path: str, query: Mapping[str, str] | None = None
) -> list[Mapping[str, Any]] | None:
    """Objects of a kind; None where this user may not see them."""
    try:
        return [*cluster.items(path, query)]
    except Refused as error:
        if error.status == 403:
            return None
        if error.status == 404:
            return []
        raise
