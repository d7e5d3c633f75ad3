"""Jobs that exist: their state, how they ended, their logs, and how they are stopped."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.attempt_outcome import failures_in_events, first_failure, record_end, record_outcome, stopped
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.cluster import Refused
from sm_llm.launcher.backends.kubeflow.manifest import KINDS
from sm_llm.launcher.backends.kubeflow.pod_logs import PodLogCopy
from sm_llm.launcher.backends.kubeflow.states import native_state, node_of
from sm_llm.launcher.observe.logs import copied_logs, read_logs
from sm_llm.runs.events.events import read_events
from sm_llm.runs.outcome import STARTING_SECONDS
from sm_llm.runs.run_states import RunState
from sm_llm.runs.stopped import StopRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore

# Phases in which a pod holds its devices, or waits for some.
_IN_USE = ("Running", "Pending")


def parts(native_id: str) -> tuple[str, str, str]:
    """Context, namespace and name. Raises ``SubmitError`` for anything else."""
    found = names.split_native(native_id)
    if found is None:
        raise SubmitError(f"{native_id!r} is not the id of a job on Kubernetes. Expected CONTEXT/NAMESPACE/NAME")
    return found


def kind_of(record: RunRecord) -> str:
    """The custom resource of a run's jobs. Raises ``SubmitError`` for one that this release does not know."""
    found = str(record.spec["backend"].get("resource", "PyTorchJob"))
    if found not in KINDS:
        raise SubmitError(f"the run's record names the resource {found!r}. Known: {', '.join(KINDS)}")
    return found


def is_of(job: Mapping[str, Any], uri: str, number: int) -> bool:
    """Whether a job is that attempt of that run: the name stays the same for all attempts."""
    found = job["metadata"].get("annotations") or {}
    return found.get(names.RUN_ANNOTATION) == uri and found.get(names.ATTEMPT_ANNOTATION) == str(number)


def state_of(run_store: RunStore, record: RunRecord, cluster: KubernetesCluster) -> NativeState:
    """The state of the newest attempt in ``record``. A job that has ended is settled there, once and for all.

    Raises ``QueryError``: nothing is known, and nothing was changed.
    """
    last = record.attempts[-1]
    _, namespace, name = parts(last.native_id)
    kind = kind_of(record)
    job = cluster.job(kind, namespace, name)
    if job is None or not is_of(job, run_store.uri, last.number):
        return _gone(run_store, record, last)
    pods = [it for it in cluster.pods(namespace, name) if is_of(it, run_store.uri, last.number)]
    native = native_state(job, pods, cluster.events)
    if not native.state.is_final:
        if job["metadata"].get("deletionTimestamp"):
            return NativeState(RunState.RUNNING, "ending: its job was deleted")
        return native
    outcome = _settle(run_store, record, last, native)
    if native.state is RunState.FAILED:
        # The operator keeps what it kept for its logs: containers that fail again and again would hold their nodes.
        for pod in pods:
            if (pod.get("status") or {}).get("phase") in _IN_USE:
                with suppress(SubmitError):
                    _keep_logs(run_store, last.number, cluster, namespace, name)
                    cluster.delete_pod(namespace, str(pod["metadata"]["name"]))
    return outcome


def _gone(run_store: RunStore, record: RunRecord, last: Attempt) -> NativeState:
    """The state of an attempt whose job is not there: not yet, or not any more."""
    run_store.refresh(f"events/attempt-{last.number}-")
    has_begun = any(it["attempt"] == last.number for it in read_events(run_store.paths.events))
    # The attempt is claimed before its job is created, and another process may read of it in between.
    if not has_begun and abs(time.time() - last.started) < STARTING_SECONDS:
        return NativeState(RunState.PENDING, "its job is being created")
    if not has_begun:
        return NativeState.of(
            record_outcome(run_store, last, stopped(run_store, record.run_id, "its job is not there: it never began"))
        )
    failure = first_failure(failures_in_events(run_store.paths, last.number))
    state = (
        RunState.FAILED
        if failure is not None and _stop_sentence(run_store.paths, last.number) is None
        else RunState.STOPPED
    )
    return _settle(run_store, record, last, NativeState(state, "its job was deleted"))


def _settle(run_store: RunStore, record: RunRecord, last: Attempt, native: NativeState) -> NativeState:
    # First the events, which hold the cause; a store that does not answer leaves the attempt unsettled.
    run_store.refresh(f"events/attempt-{last.number}-")
    stop = _stop_sentence(run_store.paths, last.number)
    state, detail = native.state, native.detail
    # After an orderly stop the pods end with 0, which the operator takes for success.
    if state is RunState.COMPLETED and stop is not None:
        state, detail = RunState.STOPPED, stop
    elif state is RunState.STOPPED and stop is not None:
        detail = stop
    return NativeState.of(record_end(run_store, record, state, detail, stop))


def _stop_sentence(paths: RunPaths, number: int) -> str | None:
    """Why the processes stopped in order, where that was the last thing they did; None where they began again."""
    found: Mapping[str, Any] | None = None
    for event in read_events(paths.events):
        if event["attempt"] == number and event["kind"] in ("stopped", "start_chosen"):
            found = event if event["kind"] == "stopped" else None
    return None if found is None else StopRecord.of_event(found).sentence


def stop_job(
    run_store: RunStore, record: RunRecord, attempt: Attempt, cluster: KubernetesCluster, *, now: bool
) -> None:
    """Ask the processes to stop after their step; a job that waits is deleted, and with ``now`` any with its pods."""
    _, namespace, name = parts(attempt.native_id)
    kind = kind_of(record)
    run_store.request_stop(attempt.number)  # it holds for later restarts, too
    job = cluster.job(kind, namespace, name)
    if job is None or not is_of(job, run_store.uri, attempt.number):
        return
    pods = cluster.pods(namespace, name)
    # Nobody in a pod that waits for its node could read the request.
    waits = native_state(job, pods, lambda _: ()).state is RunState.PENDING
    if not now and not waits:
        return
    with suppress(SubmitError):
        _keep_logs(run_store, attempt.number, cluster, namespace, name)
    cluster.delete_job(kind, namespace, name)
    if now:
        for pod in pods:
            cluster.delete_pod(namespace, str(pod["metadata"]["name"]), now=True)


def _keep_logs(run_store: RunStore, number: int, cluster: KubernetesCluster, namespace: str, name: str) -> None:
    """Copy what pods have printed that are about to be deleted; on this machine alone."""
    PodLogCopy(cluster, namespace, name, run_store.paths.logs(number)).pull()


def first_job(cluster: KubernetesCluster, kinds: Sequence[str], namespace: str, name: str) -> dict[str, Any] | None:
    """The job of a name, of the first kind that has one. Raises ``Refused`` where this user may not see them."""
    refusal = None
    for kind in kinds:
        try:
            # A kind that the cluster does not know has no job either.
            found = cluster.job(kind, namespace, name)
        except Refused as error:
            if error.status != 403:
                raise
            refusal = error
        else:
            if found is not None:
                return found
    if refusal is not None:
        raise refusal
    return None


def remove_earlier(
    run_store: RunStore, record: RunRecord, kind: str, cluster: KubernetesCluster, namespace: str, name: str
) -> None:
    """Delete the job of an earlier attempt of this run, which has ended, and wait until it is gone.

    Applying a manifest of the same name again would do nothing. Raises ``SubmitError`` for a job of another run.
    """
    job = cluster.job(kind, namespace, name)
    if job is None:
        return
    number = (job["metadata"].get("annotations") or {}).get(names.ATTEMPT_ANNOTATION, "")
    if not number.isdigit() or not is_of(job, run_store.uri, int(number)):
        raise SubmitError(
            f"{namespace} has a {kind} {name} that is not of {run_store.uri}. Delete it, or name the job anew"
        )
    if any(it.number == int(number) for it in record.attempts):
        with suppress(SubmitError):
            _keep_logs(run_store, int(number), cluster, namespace, name)
    cluster.delete_job(kind, namespace, name)
    cluster.await_deleted(kind, namespace, name)


def logs_of(
    run_store: RunStore, record: RunRecord, attempt: int, wanted: LogFilter, still_running: Callable[[], bool],
    cluster: Callable[[], KubernetesCluster],
) -> Iterator[str]:  # fmt: skip
    """Wanted lines of an attempt's pods, rank 0's first; then new ones while ``still_running``, over all restarts."""
    found = next(it for it in record.attempts if it.number == attempt)
    if found.number != record.attempts[-1].number:
        # The pods of earlier attempts are gone; what was copied before is there.
        return read_logs(run_store.paths, attempt, wanted, still_running=lambda: False)
    _, namespace, name = parts(found.native_id)
    copy = PodLogCopy(cluster(), namespace, name, run_store.paths.logs(attempt), wanted.node)
    return _followed(run_store.paths, attempt, wanted, copy, still_running)


def _followed(
    paths: RunPaths, attempt: int, wanted: LogFilter, copy: PodLogCopy, still_running: Callable[[], bool]
) -> Iterator[str]:
    is_running = False

    def check() -> bool:
        nonlocal is_running
        is_running = still_running()
        return is_running

    def copy_new() -> bool:
        copy_logs = copy.follow if is_running else copy.pull
        copy_logs()
        return False

    try:
        yield from copied_logs(paths, attempt, wanted, copy_new, check)
    finally:
        copy.close()


def shell_command(run_store: RunStore, native_id: str, node: int, cluster: KubernetesCluster) -> list[str]:
    """The command of kubectl that opens a shell in a pod. Raises ``SubmitError`` for one that does not run."""
    context, namespace, name = parts(native_id)
    # Nodes are numbered by the pods' own index, as in the logs.
    found = {node_of(it): it for it in cluster.pods(namespace, name)}
    pod = found.get(node)
    if pod is None:
        listed = ", ".join(str(it) for it in sorted(it for it in found if it is not None)) or "none"
        raise SubmitError(f"{run_store.uri} has no pod for node {node}. Pods: {listed}")
    phase = str((pod.get("status") or {}).get("phase"))
    if phase != "Running":
        raise SubmitError(f"pod {pod['metadata']['name']} is {phase}; a shell can be opened while it is Running")
    where = [] if context == names.IN_CLUSTER else ["--context", context]
    target = ["--namespace", namespace, "exec", "-it", str(pod["metadata"]["name"])]
    return ["kubectl", *where, *target, "--container", names.CONTAINER, "--", "bash"]
