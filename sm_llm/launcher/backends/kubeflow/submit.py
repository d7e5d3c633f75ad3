"""Submits an attempt: the code goes to the run's storage, then the cluster gets the ConfigMap and the job."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import job_run_store
from sm_llm.errors import QueryError, SubmitError
from sm_llm.launcher.backends.kubeflow.cluster import Refused
from sm_llm.launcher.backends.kubeflow.jobs import is_of, remove_earlier
from sm_llm.launcher.backends.kubeflow.manifest import secret_names
from sm_llm.launcher.backends.kubeflow.manifest_check import REQUEST_CHECKERS
from sm_llm.launcher.submission import MayRun, keep_request
from sm_llm.spec.backends.kubeflow import KubeflowOptions
from sm_llm.spec.validation.runner import refuse, run
from sm_llm.storage.uri import open_store
from sm_llm.terminal import counted, echo, quoted, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.backends.kubeflow.cluster import KubernetesCluster

INSTALL = {
    "PyTorchJob": "kubectl apply --server-side -k "
    "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.8.1'",
    "HyperPodPyTorchJob": "aws eks create-addon --addon-name amazon-sagemaker-hyperpod-training-operator "
    "--cluster-name NAME",
}
"""The command that installs the operator of a kind."""
_PROBE = "-check"


def check_cluster(submission: Submission, cluster: KubernetesCluster) -> None:
    """Raise ``SubmitError`` for what the cluster lacks: operator, claims, service account, secrets.

    The job is created as a dry run, so that the operator's webhook and quotas have their say, and compared with what
    the cluster would hold of it: unknown fields are dropped without a word.
    """
    options = KubeflowOptions.of(submission.job.spec)
    _, job = submission.request["manifests"]
    refuse(run(REQUEST_CHECKERS, submission.request["manifests"]))
    if not cluster.has_kind(options.resource, options.namespace):
        raise SubmitError(
            f"backend.resource: the cluster {cluster.name} has no {options.resource}. Install its operator: "
            f"{INSTALL[options.resource]}"
        )
    if absent := _absent(submission, cluster):
        raise SubmitError("; ".join(absent))
    # An earlier attempt's job may still have the name.
    probe = copy.deepcopy(dict(job))
    probe["metadata"]["name"] += _PROBE
    held = cluster.create(probe, dry_run=True)
    if dropped := dropped_fields(probe["spec"], held.get("spec"), "spec"):
        raise SubmitError(
            f"the cluster {cluster.name} would drop {', '.join(dropped[:10])} of the {options.resource}: its operator "
            f"is too old, or too new. Install another: {INSTALL[options.resource]}"
        )


def _absent(submission: Submission, cluster: KubernetesCluster) -> list[str]:
    """What the pods would wait for for ever."""
    options = KubeflowOptions.of(submission.job.spec)
    root = f"/api/v1/namespaces/{options.namespace}"
    queues = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{options.namespace}/localqueues"
    wanted = [
        *(("backend.volumes", "persistent volume claim", f"{root}/persistentvolumeclaims/{it.claim}")
          for it in options.volumes),
        *(("secrets", "secret", f"{root}/secrets/{it}") for it in secret_names(submission.job.spec.secrets.values())),
        *(("backend.image_pull_secrets", "secret", f"{root}/secrets/{it}") for it in options.image_pull_secrets),
        *([("backend.service_account", "service account", f"{root}/serviceaccounts/{options.service_account}")]
          if options.service_account else []),
        *([("backend.queue", "local queue of Kueue", f"{queues}/{options.queue}")] if options.queue else []),
    ]  # fmt: skip
    # Who may not look learns it from the pods: some roles may create jobs and read no secrets.
    return [
        f"{path}: {options.namespace} has no {what} {address.rpartition('/')[2]}"
        for path, what, address in wanted
        if cluster.exists(address) is False
    ]


def upload_inputs(submission: Submission, cluster: KubernetesCluster) -> int:
    """Store the code and the ConfigMap of an attempt in place of an earlier one's job; returns the bytes uploaded."""
    run_store = job_run_store(submission.job)
    config_map, manifest = submission.request["manifests"]
    metadata = manifest["metadata"]
    sent = _upload(submission)
    keep_request(submission)
    # First: what belongs to the job of an earlier attempt goes with it, its ConfigMap too.
    remove_earlier(run_store, run_store.record(), manifest["kind"], cluster, metadata["namespace"], metadata["name"])
    if not run_store.is_remote:
        # A request to stop in a folder holds for whichever attempt finds it.
        run_store.paths.stop_file.unlink(missing_ok=True)
    cluster.put_config_map(config_map)
    return sent


def submit(submission: Submission, cluster: KubernetesCluster) -> None:
    """Submit a claimed attempt. Raises ``SubmitError``."""
    run_store, job = job_run_store(submission.job), submission.job
    config_map, manifest = submission.request["manifests"]
    metadata = manifest["metadata"]
    sent = upload_inputs(submission, cluster)
    created = create_once(cluster, manifest, run_store.uri, job.attempt)
    own_config_maps(cluster, [config_map], created)
    pods = counted(job.spec.compute.instance_count, "pod")
    echo(
        f"created {manifest['kind']} {metadata['name']} ({pods}) in {metadata['namespace']} of {cluster.name}; "
        f"uploaded {size(sent)}",
        f"its results will be in {run_store.uri}; follow it with: sm-llm logs -f {quoted(run_store.uri)}",
        err=True,
    )


def _upload(submission: Submission) -> int:
    """Store the code bundle where it is not yet; returns the bytes that were sent."""
    sent = 0
    for address, body in submission.uploads.items():
        folder, _, key = address.rpartition("/")
        store = open_store(folder, submission.job.spec.storage_options.model_dump())
        # Named by its content: what is there is the same.
        sent += len(body) if store.put_if_absent(key, body) else 0
    return sent


def own_config_maps(
    cluster: KubernetesCluster, config_maps: Sequence[Mapping[str, Any]], owner: Mapping[str, Any]
) -> None:
    """Let ConfigMaps be deleted with the job ``owner``; where that is refused, they stay, and it is reported."""
    for it in config_maps:
        metadata = it["metadata"]
        try:
            cluster.own_config_map(metadata["namespace"], metadata["name"], owner)
        except SubmitError as error:
            echo(f"ConfigMap {metadata['name']} stays when its job is deleted: {error}", err=True)


def create_once(cluster: KubernetesCluster, manifest: Mapping[str, Any], uri: str, attempt: int) -> dict[str, Any]:
    """Create the job once, also where the answer is lost. Raises ``MayRun`` if nobody knows whether it was."""
    metadata = manifest["metadata"]
    try:
        return cluster.create(manifest)
    except SubmitError as error:
        if isinstance(error, Refused) and error.status != 409:
            raise
        try:
            found = cluster.job(manifest["kind"], metadata["namespace"], metadata["name"])
        except QueryError:
            perhaps = f"A job may have been created all the same; check it with: sm-llm status {quoted(uri)}"
            raise MayRun(f"{error}. {perhaps}") from error
        # 409 may be the answer to the second try of a request whose first was carried out.
        if found is None or not is_of(found, uri, attempt):
            raise
        return found


def dropped_fields(sent: Any, held: Any, path: str = "") -> Sequence[str]:
    """Dotted paths of what was sent and is not in the object that the cluster holds: its CRD does not know them."""
    if isinstance(sent, dict):
        if not isinstance(held, dict):
            return [path]
        found: list[str] = []
        for key, value in sent.items():
            at = f"{path}.{key}" if path else key
            # An empty value may be left out by the server.
            found += dropped_fields(value, held[key], at) if key in held else [at] if value not in ({}, [], "") else []
        return found
    if isinstance(sent, list) and isinstance(held, list):
        return [it for i, value in enumerate(sent) for it in dropped_fields(value, held[i] if i < len(held) else None,
                                                                           f"{path}.{i}")]  # fmt: skip
    return [path] if held is None and sent is not None else []
