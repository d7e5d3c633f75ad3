"""Workflows on Kubernetes: a driver in the cluster starts the job of every step behind those that it reads from.

No process of ours has to live as long as the workflow. The driver knows the cluster alone: whoever describes a step
puts the job that the driver has started into the step's record.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import LaunchRefused, SubmitError
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.cluster import Refused
from sm_llm.launcher.backends.kubeflow.driver import account_objects, driver_objects
from sm_llm.launcher.backends.kubeflow.jobs import is_of, kind_of, parts, stop_job
from sm_llm.launcher.backends.kubeflow.manifest_check import REQUEST_CHECKERS
from sm_llm.launcher.backends.kubeflow.render import document
from sm_llm.launcher.backends.kubeflow.states import condition_of, pod_problem, termination
from sm_llm.launcher.backends.kubeflow.submit import check_cluster, create_once, own_config_maps, upload_inputs
from sm_llm.launcher.backends.workflow_steps import (
    alive,
    behind,
    plans_without_result,
    previewed,
    settled,
    step_submission,
)
from sm_llm.launcher.build_submission import recorded_workflow
from sm_llm.runs.locate import find_run_store
from sm_llm.runs.outcome import STARTING_SECONDS
from sm_llm.runs.run_paths import STEPS, RunPaths, step_run_id
from sm_llm.runs.run_record import Attempt
from sm_llm.runs.run_states import RunState
from sm_llm.spec.backends.kubeflow import KubeflowOptions
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.terminal import echo, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import RunRecord
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import WorkflowSpec

_DRIVER = "Job"
_END_SECONDS = 60.0


def submissions(workflow: WorkflowSpec, plans: Sequence[Plan], run_id: str, run_uri: str) -> list[Submission]:
    """What every step would be sent, and with the last one the driver, which holds their jobs."""
    found = [
        behind(it, plan.after) for plan, it in zip(plans, previewed(workflow, plans, run_id, run_uri), strict=True)
    ]
    options = KubeflowOptions.of(workflow)
    steps = {str(plan.step): plan.after for plan in plans}
    jobs = {str(plan.step): _job(it) for plan, it in zip(plans, found, strict=True)}
    driver = driver_objects(names.object_name(run_id), run_uri, 1, options, steps, jobs)
    objects = [*account_objects(options.namespace), *driver]
    # Whoever applies what is printed must not start all jobs at once: the driver's ConfigMap has them.
    shown = [replace(it, document=document([it.request["manifests"][0]])) for it in found]
    last = replace(
        shown[-1],
        request={**shown[-1].request, "driver": objects},
        document=shown[-1].document + document(objects),
    )
    return [*shown[:-1], last]


def _job(submission: Submission) -> dict[str, Any]:
    found: dict[str, Any] = submission.request["manifests"][1]
    return found


def start(run_store: RunStore, number: int, connect: Callable[[str | None], KubernetesCluster]) -> str:
    """Start the driver for every step of the workflow recorded in ``run_store`` that has no result yet; the native id.

    Raises ``SubmitError``; then nothing of it runs.
    """
    record = run_store.record()
    workflow = recorded_workflow(run_store, record)
    options = KubeflowOptions.of(workflow)
    cluster = connect(options.context)
    plans = plans_without_result(run_store, record, workflow)
    name = names.object_name(record.run_id)
    found: dict[str, Submission] = {}
    for plan in plans:
        _, submission = step_submission(run_store, record, workflow, plan)
        check_cluster(submission, cluster)
        found[str(plan.step)] = submission
    # A step that has its result has no job in this attempt, and nothing waits for it.
    steps = {str(plan.step): [it for it in plan.after if it in found] for plan in plans}
    config_map, job = driver_objects(
        name, run_store.uri, number, options, steps, {step: _job(it) for step, it in found.items()}
    )
    refuse(run(REQUEST_CHECKERS, (config_map, job)))
    _create_account(options.namespace, cluster)
    # First: the driver of an earlier attempt must not start what is prepared here.
    remove_driver(run_store.uri, cluster, options.namespace, name)
    for submission in found.values():
        upload_inputs(submission, cluster)
    cluster.put_config_map(config_map)
    created = create_once(cluster, job, run_store.uri, number)
    own_config_maps(cluster, [config_map, *(it.request["manifests"][0] for it in found.values())], created)
    native_id = names.native_id(cluster.name, options.namespace, name)
    # The attempt was claimed with the cluster and namespace from before a change that it makes.
    run_store.update(lambda held: _at(held, number, native_id))
    echo(
        f"created the Job {name} in {options.namespace} of {cluster.name}, which starts the steps {', '.join(found)}",
        f"follow it with: sm-llm logs -f {quoted(run_store.uri)}",
        err=True,
    )
    return native_id


def _at(record: RunRecord, number: int, native_id: str) -> RunRecord:
    held = record.attempt(number)
    return record if held is None else record.with_attempt(held.model_copy(update={"native_id": native_id}))


def _create_account(namespace: str, cluster: KubernetesCluster) -> None:
    account, *roles = account_objects(namespace)
    there = [cluster.exists(cluster.path(it["kind"], namespace, names.DRIVER)) for it in (*roles, account)]
    # The account comes last, so that its being there means that its roles are: who may create jobs seldom sees roles.
    has_roles = there[-1] is not False
    for manifest, is_there in zip((*roles, account), there, strict=True):
        if is_there or (is_there is None and has_roles):
            continue
        try:
            cluster.create(manifest)
        except Refused as error:
            if error.status == 409:  # another launch was faster
                continue
            raise SubmitError(
                f"{error}. Workflows need the {manifest['kind']} {names.DRIVER} in {namespace}: an administrator "
                "creates it from what fit --dry-run prints"
            ) from error


def remove_driver(uri: str, cluster: KubernetesCluster, namespace: str, name: str) -> bool:
    """Delete the driver of the run at ``uri``, and wait until it is gone: nothing is started any more.

    Returns whether it was there.
    """
    job = cluster.job(_DRIVER, namespace, name)
    if job is None:
        return False
    if (job["metadata"].get("annotations") or {}).get(names.RUN_ANNOTATION) != uri:
        raise SubmitError(f"{namespace} has a Job {name} that is not of {uri}. Delete it, or name the workflow anew")
    cluster.delete_job(_DRIVER, namespace, name)
    cluster.await_deleted(_DRIVER, namespace, name, _END_SECONDS)
    return True


def above(run_store: RunStore, record: RunRecord) -> RunRecord | None:
    """The record of the workflow that the run at ``run_store`` is a step of; None for a run of its own."""
    parent, _, step = run_store.uri.rpartition("/")
    parent, _, folder = parent.rpartition("/")
    if folder != STEPS or not record.run_id.endswith(f"-{step}"):
        return None
    workflow = find_run_store(parent)
    found = workflow.record() if workflow.exists() else None
    # A folder may be called like that of steps by chance.
    is_step = found is not None and "steps" in found.spec and step_run_id(found.run_id, step) == record.run_id
    return found if is_step else None


def adopted(run_store: RunStore, record: RunRecord, workflow: RunRecord, cluster: KubernetesCluster) -> RunRecord:
    """The record of a step, with the attempt whose job the driver has created since."""
    last = record.attempts[-1] if record.attempts else None
    if last is not None and (last.state is None or last.state.is_completed):
        return record
    namespace, name = str(record.spec["backend"].get("namespace", "default")), names.object_name(record.run_id)
    number = record.next_attempt
    job = cluster.job(kind_of(record), namespace, name)
    if job is None or not is_of(job, run_store.uri, number):
        return record
    native_id = names.native_id(cluster.name, namespace, name)
    attempt = Attempt.claim(number, native_id, RunPaths.request_key(number))
    # A clock that is behind must not make it a step of the attempt before.
    attempt = attempt.model_copy(update={"started": max(attempt.started, workflow.attempts[-1].started)})
    with suppress(LaunchRefused, SubmitError):  # somebody else who describes the step has done it
        run_store.claim(attempt)
    run_store.update(lambda held: held if held.attempt(number) is not None else held.with_attempt(attempt))
    return run_store.record()


def unbegun(record: RunRecord, workflow: RunRecord) -> NativeState | None:
    """The state of a step that the workflow's newest attempt has not begun; None for one that it has."""
    if _has_begun(record, workflow):
        return None
    if workflow.attempts[-1].state is None:
        return NativeState(RunState.PENDING, "waits for the steps before it")
    return None if record.attempts else NativeState(RunState.STOPPED, "a step before it has no result")


def _has_begun(record: RunRecord, workflow: RunRecord) -> bool:
    """Whether the newest attempt of a workflow has begun a step, or has no need to."""
    last = record.attempts[-1] if record.attempts else None
    if last is None:
        return False
    is_done = last.state is not None and last.state.is_completed
    return is_done or last.started >= workflow.attempts[-1].started


def state_of(
    run_store: RunStore, record: RunRecord, cluster: KubernetesCluster, describe: Callable[[RunStore], NativeState]
) -> NativeState:
    """The state of the newest attempt in a workflow's ``record``, from its steps' jobs; settled once all have ended.

    ``describe`` gives that of one step. Raises ``QueryError``: nothing is known, and nothing was changed.
    """
    last = record.attempts[-1]
    _, namespace, name = parts(last.native_id)
    # Before the steps: once it has ended, it starts none any more.
    driver = cluster.job(_DRIVER, namespace, name)
    if driver is not None and not is_of(driver, run_store.uri, last.number):
        driver = None
    found: dict[str, NativeState] = {}
    for step in record.spec["steps"]:
        step_store = run_store.below(STEPS, step)
        if step_store.exists() and _has_begun(adopted(step_store, step_store.record(), record, cluster), record):
            found[step] = describe(step_store)
    if (native := alive(found)) is not None:
        return native
    if driver is None:
        if not found and abs(time.time() - last.started) < STARTING_SECONDS:
            return NativeState(RunState.PENDING, "its driver is being created")
        return settled(run_store, record, last, found, "it was never started")
    pods = cluster.pods(namespace, name)
    if not _has_ended(driver):
        words = next((it for it in map(pod_problem, pods) if it is not None), None)
        return NativeState(
            RunState.PENDING, f"its driver: {words.detail}" if words else "its next step is about to begin"
        )
    return settled(run_store, record, last, found, f"it was never started{_why(driver, pods)}")


def _has_ended(driver: Mapping[str, Any]) -> bool:
    condition = condition_of(driver)
    return condition is not None and condition.get("type") in ("Complete", "Failed")


def _why(driver: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> str:
    condition = condition_of(driver)
    if condition is None or condition.get("type") != "Failed":
        return ""
    for pod in pods:
        for it in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (it.get("state") or {}).get("terminated") or (it.get("lastState") or {}).get("terminated") or {}
            if ended.get("exitCode"):
                return f": its driver: {termination(ended)}"
    return f": its driver: {condition.get('message') or condition.get('reason')}"


def stop(
    run_store: RunStore, record: RunRecord, cluster: KubernetesCluster, describe: Callable[[RunStore], NativeState], *,
    now: bool,
) -> None:  # fmt: skip
    """Delete the driver, so that no step begins any more, and ask those that run to stop; with ``now`` delete them."""
    _, namespace, name = parts(record.attempts[-1].native_id)
    was_there, has_begun = remove_driver(run_store.uri, cluster, namespace, name), False
    for step in record.spec["steps"]:
        step_store = run_store.below(STEPS, step)
        if not step_store.exists():
            continue
        own = adopted(step_store, step_store.record(), record, cluster)
        if not _has_begun(own, record):
            continue
        has_begun = True
        if not describe(step_store).state.is_final:
            stop_job(step_store, own, own.attempts[-1], cluster, now=now)
    if was_there and not has_begun:
        # Described, it would be taken for one whose driver is still being created (``STARTING_SECONDS``).
        settled(run_store, record, record.attempts[-1], {}, "it was never started")
