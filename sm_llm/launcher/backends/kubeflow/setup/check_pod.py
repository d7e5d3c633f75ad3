"""A pod of a minute that shows whether a cluster's nodes pull an image and can run jobs in it."""

from __future__ import annotations

import time
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from sm_llm.errors import QueryError, SubmitError
from sm_llm.launcher.backend import ClusterCheck
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.states import pod_problem, removal, termination
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster
    from sm_llm.spec.backends.kubeflow import KubeflowOptions

SECONDS = 120.0
"""Images of 10 GB and more take longer where a node has never pulled them."""
_POLL_SECONDS = 1.0
_PROGRAM = "import sys, boto3\nsys.exit(0 if sys.version_info >= (3, 11) else 'python3 is older than 3.11')"


def image_check(
    options: KubeflowOptions, cluster: KubernetesCluster, tell: Callable[[str], None], *,
    sleep: Callable[[float], None] = time.sleep,
) -> ClusterCheck:  # fmt: skip
    """Start a pod of the image, watch it, and delete it."""
    name = f"sm-llm-check-{token_hex(4)}"
    try:
        cluster.create(_pod(name, options))
    except SubmitError as error:
        return ClusterCheck("image", "skipped", f"no pod could be created: {error}")
    tell(f"pod {name} in {options.namespace} pulls {options.image}, for at most {SECONDS:.0f} s")
    try:
        return _watched(name, options, cluster, sleep)
    finally:
        with suppress(SubmitError):
            cluster.delete_pod(options.namespace, name, now=True)


def _pod(name: str, options: KubeflowOptions) -> dict[str, Any]:
    tolerations = [it.model_dump(exclude_none=True) for it in options.tolerations]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": names.CONTAINER,
                "image": options.image,
                "command": ["python3", "-P", "-c", _PROGRAM],
                "terminationMessagePolicy": "FallbackToLogsOnError",
            }
        ],
        "imagePullSecrets": [{"name": it} for it in options.image_pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "tolerations": tolerations,
    }
    if options.service_account is not None:
        spec["serviceAccountName"] = options.service_account
    metadata = {"name": name, "namespace": options.namespace, "labels": {names.MANAGER_LABEL: names.MANAGER}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _watched(
    name: str, options: KubeflowOptions, cluster: KubernetesCluster, sleep: Callable[[float], None]
) -> ClusterCheck:
    deadline, words = time.monotonic() + SECONDS, "it is being pulled"
    while time.monotonic() < deadline:
        with suppress(QueryError):  # a cluster that is busy answers later
            pod = cluster.job("Pod", options.namespace, name)
            if pod is None:
                return ClusterCheck("image", "skipped", f"pod {name} was deleted")
            phase = (pod.get("status") or {}).get("phase")
            if phase == "Succeeded":
                return ClusterCheck("image", "ok", "pulled; it has python3 and boto3")
            if phase == "Failed":
                return ClusterCheck("image", "failed", _end(pod))
            found = pod_problem(pod)
            words = found.detail if found is not None else words
            # A pod without a node shows nothing of the image, and may find one yet.
            if found is not None and found.state is RunState.PENDING and "waiting for nodes" not in words:
                return ClusterCheck("image", "failed", words)
        sleep(_POLL_SECONDS)
    return ClusterCheck("image", "skipped", f"not known after {SECONDS:.0f} s: {words}")


def _end(pod: Mapping[str, Any]) -> str:
    for it in (pod.get("status") or {}).get("containerStatuses") or ():
        return termination((it.get("state") or {}).get("terminated") or {})
    return removal(pod) or "it failed"
