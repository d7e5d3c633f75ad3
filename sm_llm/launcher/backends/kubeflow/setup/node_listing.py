"""The nodes of a cluster as the API server lists them: state, what keeps pods away, accelerators, HyperPod's health."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.launcher.backend import ClusterNode
from sm_llm.launcher.backends.kubeflow.names import DEEP_CHECK_LABEL, HEALTH_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

DEVICES = ("nvidia.com/gpu", "aws.amazon.com/neuron", "aws.amazon.com/neurondevice")
"""Resources that stand for whole accelerators; a node's plugin names one of them."""
_KEEPS_AWAY = ("NoSchedule", "NoExecute")
_FINISHED = ("Succeeded", "Failed")


def nodes_of(nodes: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]] | None) -> list[ClusterNode]:
    """The nodes by name. ``pods`` are those of all namespaces; None where this user may not see them."""
    return sorted((_node(it, pods) for it in nodes), key=lambda it: it.name)


def _node(node: Mapping[str, Any], pods: Sequence[Mapping[str, Any]] | None) -> ClusterNode:
    name, labels = str(node["metadata"]["name"]), node["metadata"].get("labels") or {}
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((it for it in conditions if it.get("type") == "Ready"), {})
    is_closed = bool((node.get("spec") or {}).get("unschedulable"))
    state = "Ready" if ready.get("status") == "True" else "NotReady"
    count = devices_of(node)
    is_usable = state == "Ready" and not is_closed
    free = None
    if count is not None and pods is not None:
        free = max(0, count - sum(_asked(it) for it in pods if _is_on(it, name))) if is_usable else 0
    health = [labels[it] for it in (HEALTH_LABEL, DEEP_CHECK_LABEL) if it in labels]
    reason = "; ".join(_reasons(node, ready))
    return ClusterNode(
        name, f"{state},SchedulingDisabled" if is_closed else state, reason, count, free, ", ".join(health)
    )


def devices_of(node: Mapping[str, Any]) -> int | None:
    """Accelerators that pods can get of a node; None where no plugin has registered any."""
    offered = (node.get("status") or {}).get("allocatable") or {}
    found = [int(offered[it]) for it in DEVICES if it in offered]
    # Newer plugins of Neuron name the same devices twice.
    return max(found) if found else None


def _reasons(node: Mapping[str, Any], ready: Mapping[str, Any]) -> Iterator[str]:
    if ready.get("status") != "True":
        yield str(ready.get("message") or ready.get("reason") or "its kubelet has not reported")
    for it in (node.get("status") or {}).get("conditions") or ():
        if it.get("type") != "Ready" and it.get("status") == "True":
            yield str(it.get("type"))
    for it in (node.get("spec") or {}).get("taints") or ():
        # Cordoned nodes have the taint beside the state that is shown already.
        if it.get("effect") in _KEEPS_AWAY and it.get("key") != "node.kubernetes.io/unschedulable":
            yield f"taint {it.get('key')}{'=' + str(it['value']) if it.get('value') else ''}:{it['effect']}"


def _is_on(pod: Mapping[str, Any], node: str) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return (pod.get("spec") or {}).get("nodeName") == node and phase not in _FINISHED


def _asked(pod: Mapping[str, Any]) -> int:
    """Accelerators that a pod holds: the sum of its containers."""
    total = 0
    for it in (pod.get("spec") or {}).get("containers") or ():
        asked = (it.get("resources") or {}).get("requests") or (it.get("resources") or {}).get("limits") or {}
        total += max((int(asked[name]) for name in DEVICES if name in asked), default=0)
    return total
