"""The state of a job in our words, from its conditions, its pods and what controllers report of them.

A job's own conditions state too little: an image that cannot be pulled, pods that fit on no node and containers that
fail again and again leave a job "Created" or "Running".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.kubeflow.names import CONTAINER, ELASTIC_LABEL
from sm_llm.runs.run_states import RunState
from sm_llm.terminal import counted

CONDITIONS = {
    "Created": RunState.PENDING,
    "Suspended": RunState.PENDING,
    "Running": RunState.RUNNING,
    "Restarting": RunState.RESTARTING,
    "Succeeded": RunState.COMPLETED,
    "Failed": RunState.FAILED,
}
"""Types of a job's conditions; what is not here is shown raw."""
# HyperPod's operator has names of its own for some.
_HYPERPOD = {"Completed": "Succeeded", "Complete": "Succeeded", "Starting": "Created", "Pending": "Created"}
_VOLUME = re.compile(r"persistent ?volume", re.IGNORECASE)
_DEADLINE = re.compile(r"DeadlineExceeded|active longer than specified deadline")

WAITS = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "the name of its image is not valid",
    "ImageInspectError": "its image cannot be read",
    "ErrImageNeverPull": "its image is not on the node",
    "CreateContainerConfigError": "its container cannot be configured",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
}
"""Reasons for which a container waits, and that a person has to do something about."""
_RESTARTS = "CrashLoopBackOff"
_REMEDY = {
    "ErrImagePull": "Check backend.image and backend.image_pull_secrets",
    "ImagePullBackOff": "Check backend.image and backend.image_pull_secrets",
    "InvalidImageName": "Check backend.image",
    "CreateContainerConfigError": "Check backend.volumes and the secrets that the job names",
}
Events = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""An object -> what controllers report of it, oldest first."""
_POD = re.compile(r"-(?P<kind>[a-z]+)-(?P<number>[0-9]+)$")


def condition_of(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The condition that holds: the last one with status True. None before the operator has seen the job."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((it for it in reversed(conditions) if it.get("status") == "True"), None)


def node_of(pod: Mapping[str, Any]) -> int | None:
    """The node that a pod is in our counting: the master, or the first pod, is 0. None for a name that is not ours."""
    match = _POD.search(str(pod["metadata"]["name"]))
    has_master = ELASTIC_LABEL not in (pod["metadata"].get("labels") or {})
    return None if match is None else int(match["number"]) + (1 if match["kind"] == "worker" and has_master else 0)


def native_state(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], events: Events) -> NativeState:
    """The state of a job and why. ``events`` asks for those of the job, or a pod, that nothing else explains."""
    condition = condition_of(job)
    if condition is None:
        return NativeState(RunState.PENDING, "the operator has not seen the job yet")
    name = _HYPERPOD.get(str(condition.get("type")), str(condition.get("type")))
    words = str(condition.get("message") or condition.get("reason") or "")
    if name not in CONDITIONS:
        return NativeState(RunState.UNKNOWN, f"{name}: {words}" if words else name)
    state = CONDITIONS[name]
    if name == "Suspended" or (state is RunState.PENDING and _is_suspended(job)):
        return NativeState(RunState.PENDING, _quota(events(job)))
    if name == "Failed":
        return _failed(condition, words, pods)
    if name == "Succeeded":
        return NativeState(state, "")
    # The operator writes nothing of any of this in its conditions.
    found = [it for it in map(pod_problem, sorted(pods, key=_order)) if it is not None]
    fewest = (job.get("spec") or {}).get("elasticPolicy", {}).get("minReplicas")
    running = [it for it in pods if (it.get("status") or {}).get("phase") == "Running"]
    if state is RunState.RUNNING and fewest is not None and fewest <= len(running) < len(pods):
        # The training continues without them, so they are no reason to wait for.
        return NativeState(state, "; ".join([_counts(pods), *(it.detail for it in found[:1])]))
    if found:
        # What a person has to do something about comes first: the rest of the pods may only wait for it.
        return min(found, key=lambda it: it.state is not RunState.PENDING)
    if state is RunState.PENDING and not pods:
        return NativeState(state, f"its pods are being created{_last(events(job))}")
    if state is RunState.RESTARTING:
        return NativeState(state, words)
    return NativeState(_by_pods(state, pods), f"{_counts(pods)}{_waits(pods, events)}")


def _waits(pods: Sequence[Mapping[str, Any]], events: Events) -> str:
    """What the first pod waits for that has a node and no container yet: a volume that is not mounted, for one."""
    waiting = [it for it in sorted(pods, key=_order) if (it.get("status") or {}).get("phase") == "Pending"]
    if not waiting:
        return ""
    name = str(waiting[0]["metadata"]["name"])
    words = _last([it for it in events(waiting[0]) if it.get("type") == "Warning"])
    return f"; {name}{words}" if words else ""


def _by_pods(state: RunState, pods: Sequence[Mapping[str, Any]]) -> RunState:
    """The operator calls a job running as soon as one pod is."""
    waits = any((it.get("status") or {}).get("phase") == "Pending" for it in pods)
    return RunState.PENDING if state is RunState.RUNNING and waits else state


def _order(pod: Mapping[str, Any]) -> int:
    return node_of(pod) or 0


def _is_suspended(job: Mapping[str, Any]) -> bool:
    policy = (job.get("spec") or {}).get("runPolicy") or {}
    return policy.get("suspend") is True


def _quota(events: Sequence[Mapping[str, Any]]) -> str:
    return f"waiting for quota: the queue has not admitted the job{_last(events)}"


def _last(events: Sequence[Mapping[str, Any]]) -> str:
    words = next((str(it.get("message")) for it in reversed(events) if it.get("message")), "")
    return f" ({words})" if words else ""


def _counts(pods: Sequence[Mapping[str, Any]]) -> str:
    phases = [str((it.get("status") or {}).get("phase") or "Pending") for it in pods]
    if len(set(phases)) == 1:
        several = counted(len(pods), "pod")
        return f"{several} {phases[0].lower()}" if phases[0] != "Running" else f"running in {several}"
    listed = (f"{phases.count(it)} {it.lower()}" for it in dict.fromkeys(phases))
    return f"of {len(pods)} pods " + ", ".join(listed)


def pod_problem(pod: Mapping[str, Any]) -> NativeState | None:
    """Why a pod does not run, and what a person can do about it; None where nothing is wrong with it."""
    status, name = pod.get("status") or {}, str(pod["metadata"]["name"])
    unscheduled: Mapping[str, Any] = next(
        (it for it in status.get("conditions") or () if it.get("type") == "PodScheduled"), {}
    )
    # Asked before the containers: a pod without a node has no container that could have a state.
    if unscheduled.get("status") == "False":
        words = str(unscheduled.get("message"))
        if _VOLUME.search(words):
            return NativeState(RunState.PENDING, f"waiting for a volume: {name}: {words}. Check backend.volumes")
        return NativeState(RunState.PENDING, f"waiting for nodes: {name}: {words}")
    if (removed := removal(pod)) is not None:
        return NativeState(RunState.RESTARTING, f"{name}: {removed}")
    for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason"))
        if reason in WAITS:
            words = f" ({waiting['message']})" if waiting.get("message") else ""
            remedy = f". {_REMEDY[reason]}" if reason in _REMEDY else ""
            return NativeState(RunState.PENDING, f"{name}: {WAITS[reason]}: {reason}{words}{remedy}")
        last = (container.get("lastState") or {}).get("terminated") or {}
        ended = (container.get("state") or {}).get("terminated") or {}
        if reason == _RESTARTS or (ended.get("exitCode") and not waiting):
            count = container.get("restartCount", 0)
            return NativeState(
                RunState.RESTARTING, f"{name}: {termination(ended or last)}; started again {count} times"
            )
    return None


def removal(pod: Mapping[str, Any]) -> str | None:
    """Why the cluster itself ended a pod: its node had too little memory or disk, or is drained; None otherwise."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"{status['reason']}: {status.get('message') or 'no message'}"
    conditions = status.get("conditions") or ()
    found: Mapping[str, Any] = next((it for it in conditions if it.get("type") == "DisruptionTarget"), {})
    if found.get("status") == "True":
        return f"{found.get('reason')}: {found.get('message') or 'no message'}"
    return None


def termination(found: Mapping[str, Any]) -> str:
    """Why a container has ended: the last line that it left, or Kubernetes' reason and the exit code."""
    lines = str(found.get("message") or "").strip().splitlines()
    if found.get("reason") == "OOMKilled":
        return "its memory was used up (OOMKilled). Raise backend.memory_gib_per_pod"
    code = f"exit code {found.get('exitCode')}"
    return f"{code}: {lines[-1]}" if lines else code


def _failed(condition: Mapping[str, Any], words: str, pods: Sequence[Mapping[str, Any]]) -> NativeState:
    # The reason is the newer operators', the words are those of older ones.
    if _DEADLINE.search(f"{condition.get('reason')} {words}"):
        return NativeState(RunState.INTERRUPTED, "the time limit backend.time_limit_minutes was reached")
    ended = []
    for pod in sorted(pods, key=_order):
        if (evicted := removal(pod)) is not None:
            # Without a time of its own: what the cluster did comes before what the other pods lost by it.
            ended.append(("", f"{pod['metadata']['name']}: {evicted}"))
        for it in (pod.get("status") or {}).get("containerStatuses") or ():
            # A container that is started again shows its end in its last state.
            found = (it.get("state") or {}).get("terminated") or (it.get("lastState") or {}).get("terminated") or {}
            if it.get("name") == CONTAINER and found.get("exitCode"):
                ended.append((str(found.get("finishedAt") or ""), f"{pod['metadata']['name']}: {termination(found)}"))
    running = [str(it["metadata"]["name"]) for it in pods if (it.get("status") or {}).get("phase") == "Running"]
    # The first to end is the cause: the others have lost it.
    first = min(ended)[1] if ended else words
    still = f"; still there: {', '.join(running[:5])}" if running else ""
    return NativeState(RunState.FAILED, f"{first}{still}")
