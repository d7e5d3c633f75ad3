"""The manifest of a job as a plain value: a PyTorchJob or a HyperPodPyTorchJob, and the ConfigMap beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JOB_ENVIRONMENT
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.runs.run_paths import JOB_FILE
from sm_llm.spec.backends.kubeflow import KubeflowOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backends.kubeflow.target import KubeflowTarget

DEVICES_ENVIRONMENT = "SM_LLM_POD_DEVICES"
"""Names the accelerators that each pod must have."""
SCRATCH_ENVIRONMENT = "SM_LLM_POD_SCRATCH"
"""Folder for large files of a pod, on a mount."""
POD_ENVIRONMENT = "SM_LLM_POD_NAME"
MESSAGE_ENVIRONMENT = "SM_LLM_POD_MESSAGE"
"""File in which a workflow's step states that it has stopped: its operator takes that for success."""
NODE_PROGRAM = "sm_llm/worker/kubeflow/node.py"
FETCH_SCRIPT = "fetch_code.py"
# The training line of ``worker.training.step_metrics``.
_LOSS_LINE = r".*\bLoss: (\S+).*"


@dataclass(frozen=True)
class Kind:
    """Where objects of a kind are found."""

    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


KINDS = {
    "PyTorchJob": Kind("kubeflow.org", "v1", "pytorchjobs"),
    "HyperPodPyTorchJob": Kind("sagemaker.amazonaws.com", "v1", "hyperpodpytorchjobs"),
}
"""The custom resources that jobs of ours are."""


@dataclass(frozen=True)
class Code:
    """The code bundle: its address and the SHA-256 of the archive inside."""

    address: str
    digest: str


def config_map(job: JobFile, name: str, options: KubeflowOptions) -> dict[str, Any]:
    """job.json, and the script by which pods fetch the code."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": options.namespace, **identity(job.run_uri, job.attempt, name)},
        "data": {JOB_FILE: job.model_dump_json(indent=2) + "\n", FETCH_SCRIPT: fetch_script()},
    }


def custom_resource(
    job: JobFile, name: str, target: KubeflowTarget, code: Code, *, is_step: bool = False
) -> dict[str, Any]:
    """The job itself; ``is_step`` of a workflow."""
    options = KubeflowOptions.of(job.spec)
    kind = KINDS[options.resource]
    metadata = identity(job.run_uri, job.attempt, name)
    metadata["labels"] |= _queue_labels(options)
    metadata["annotations"][names.BUNDLE_ANNOTATION] = code.address
    if options.retry == "auto-resume":
        metadata["annotations"] |= {
            names.RESUME_ANNOTATION: "true",
            names.RETRIES_ANNOTATION: str(target.max_restarts),
        }
    template = _template(job, name, options, target, code)
    if is_step:
        [main] = template["spec"]["containers"]
        main["env"].append({"name": MESSAGE_ENVIRONMENT, "value": names.MESSAGE})
    spec = (_kubeflow_spec if options.resource == "PyTorchJob" else _hyperpod_spec)(options, target, template)
    return {
        "apiVersion": kind.api_version,
        "kind": options.resource,
        "metadata": {"name": name, "namespace": options.namespace, **metadata},
        "spec": {"nprocPerNode": str(target.processes), **spec},
    }


def identity(run_uri: str, attempt: int, name: str) -> dict[str, dict[str, str]]:
    """The metadata by which objects of an attempt are found."""
    return {
        "labels": {names.MANAGER_LABEL: names.MANAGER, names.JOB_LABEL: name},
        "annotations": {names.RUN_ANNOTATION: run_uri, names.ATTEMPT_ANNOTATION: str(attempt)},
    }


def _queue_labels(options: KubeflowOptions) -> dict[str, str]:
    labels = {names.QUEUE_LABEL: options.queue, names.PRIORITY_LABEL: options.priority}
    return {name: value for name, value in labels.items() if value is not None}


def _run_policy(options: KubeflowOptions) -> dict[str, Any]:
    limit = options.time_limit_minutes
    return {
        # The operator would delete the pods, and their logs with them.
        "cleanPodPolicy": "None",
        "ttlSecondsAfterFinished": 60 * options.keep_minutes,
        **({} if limit is None else {"activeDeadlineSeconds": 60 * limit}),
    }


def _kubeflow_spec(options: KubeflowOptions, target: KubeflowTarget, template: dict[str, Any]) -> dict[str, Any]:
    policy = _run_policy(options)
    if target.max_restarts is not None:
        # The operator counts the restarts of all pods together, and with one pod all start again. It gives up when the
        # limit is reached, not when it is exceeded.
        policy["backoffLimit"] = target.max_restarts * target.pods + 1
    # OnFailure restarts the container in its pod, so what its node has staged and kept is there for the next start.
    restart = "Never" if target.max_restarts is None else "OnFailure"

    def replicas(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": restart, "template": template}

    if target.sizes:
        # Only workers can be added and removed. Their rendezvous is the first pod's, which needs no etcd.
        elastic = {"rdzvBackend": "c10d", "minReplicas": target.sizes[0], "maxReplicas": target.pods}
        workers = {"Worker": replicas(target.pods)}
        return {"runPolicy": policy, "elasticPolicy": elastic, "pytorchReplicaSpecs": workers}
    # With a master, rank 0 is always in the same pod; without one a rendezvous would elect it.
    replica_specs = {"Master": replicas(1)}
    if target.pods > 1:
        replica_specs["Worker"] = replicas(target.pods - 1)
    return {"runPolicy": policy, "pytorchReplicaSpecs": replica_specs}


def _hyperpod_spec(options: KubeflowOptions, target: KubeflowTarget, template: dict[str, Any]) -> dict[str, Any]:
    policy = _run_policy(options)
    policy["jobMaxRetryCount"] = target.max_restarts or 0
    if target.hang_seconds is not None:
        policy["logMonitoringConfiguration"] = [
            {
                "name": "training-line",
                "logPattern": _LOSS_LINE,
                "expectedStartCutOffInSeconds": target.first_step_seconds,
                "expectedRecurringFrequencyInSeconds": target.hang_seconds,
                # After the last step the job exports and publishes, and logs no more steps.
                **({"stopPattern": target.last_line} if target.last_line else {}),
            }
        ]
    return {
        "runPolicy": policy,
        "replicaSpecs": [{"name": "pods", "replicas": target.pods, "template": template}],
    }


def _template(job: JobFile, name: str, options: KubeflowOptions, target: KubeflowTarget, code: Code) -> dict[str, Any]:
    metadata = identity(job.run_uri, job.attempt, name)
    # HyperPod's task governance reads the labels of pods, too.
    metadata["labels"] |= _queue_labels(options)
    if target.sizes:
        metadata["labels"][names.ELASTIC_LABEL] = "true"
    if options.topology is not None:
        metadata["annotations"][f"kueue.x-k8s.io/podset-{options.topology_mode}-topology"] = options.topology
    return {"metadata": metadata, "spec": _pod(job, name, options, target, code)}


def _pod(job: JobFile, name: str, options: KubeflowOptions, target: KubeflowTarget, code: Code) -> dict[str, Any]:
    volumes, mounts = _volumes(job, name, options)
    image = options.image
    resources = dict(target.resources)
    own = {key: value for key, value in resources.items() if key in ("cpu", "memory")}
    # The init container asks for processors and memory, too: a quota may demand them of every container.
    fetch = {
        "name": "fetch-code",
        "image": image,
        "command": ["python3", "-P", f"{names.JOB}/{FETCH_SCRIPT}"],
        "args": [literal(code.address), code.digest, names.CODE, f"{names.JOB}/{JOB_FILE}"],
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"resources": equal(own)} if own else {}),
    }
    # hyperpodrun reports to HyperPod's operator, and takes torchrun's arguments.
    runner = "torchrun" if options.resource == "PyTorchJob" else "hyperpodrun"
    main = {
        "name": names.CONTAINER,
        "image": image,
        "command": ["python3", "-P", f"{names.CODE}/{NODE_PROGRAM}"],
        "args": [runner, str(target.pods), str(target.processes), target.entry, *_elastic_arguments(target)],
        "env": _environment(job, options, target),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"resources": equal(resources)} if resources else {}),
    }
    return {
        **({"serviceAccountName": options.service_account} if options.service_account else {}),
        **({"imagePullSecrets": [{"name": it} for it in options.image_pull_secrets]} if options.image_pull_secrets
           else {}),
        **({"nodeSelector": dict(target.node_selector)} if target.node_selector else {}),
        **({"tolerations": [it.model_dump(exclude_none=True) for it in options.tolerations]} if options.tolerations
           else {}),
        "terminationGracePeriodSeconds": options.stop_seconds,
        "initContainers": [fetch],
        "containers": [main],
        "volumes": volumes,
    }  # fmt: skip


def _elastic_arguments(target: KubeflowTarget) -> list[str]:
    return [",".join(map(str, target.sizes)), str(target.wait_seconds)] if target.sizes else []


def equal(resources: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Devices cannot be overcommitted, and equal values of the rest make a pod the last to be evicted."""
    return {"requests": dict(resources), "limits": dict(resources)}


def literal(value: str) -> str:
    """A value that Kubernetes does not expand: it replaces ``$(NAME)`` in variables and arguments, and ``$$`` by
    ``$``."""
    return value.replace("$", "$$")


def _environment(job: JobFile, options: KubeflowOptions, target: KubeflowTarget) -> list[dict[str, Any]]:
    own = dict(job.spec.environment)
    # An empty entry would mean the working folder, whose files are the user's.
    path = ":".join(it for it in own.pop("PYTHONPATH", "").split(":") if it)
    ours = {
        JOB_ENVIRONMENT: f"{names.JOB}/{JOB_FILE}",
        "PYTHONPATH": f"{names.CODE}:{path}" if path else names.CODE,  # first, so that the bundle is what runs
        SCRATCH_ENVIRONMENT: names.SCRATCH,
    }
    if target.devices:
        ours[DEVICES_ENVIRONMENT] = target.devices
    values = {**ours, **dict(target.environment), **own}
    listed: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in values.items()]
    return [*listed, {"name": POD_ENVIRONMENT, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]


def _volumes(job: JobFile, name: str, options: KubeflowOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The volumes of a pod, and where its containers see them."""
    size = options.shared_memory_gib
    memory = {"medium": "Memory", **({} if size is None else {"sizeLimit": f"{size}Gi"})}
    folder = options.node_folder
    scratch = {"emptyDir": {}} if folder is None else {"hostPath": {"path": folder, "type": "Directory"}}
    listed: list[tuple[str, dict[str, Any], str, bool]] = [
        ("code", {"emptyDir": {}}, names.CODE, False),
        ("job", {"configMap": {"name": name}}, names.JOB, True),
        ("scratch", scratch, names.SCRATCH, False),
        # Containers get 64 MiB of shared memory otherwise, and NCCL and data loaders need more.
        ("shared-memory", {"emptyDir": memory}, names.SHARED_MEMORY, False),
    ]
    claims: dict[str, str] = {}
    for it in options.volumes:
        # A claim that is mounted at two places is one volume: a pod may name a claim once.
        volume = claims.setdefault(it.claim, f"claim-{len(claims)}")
        listed.append((volume, {"persistentVolumeClaim": {"claimName": it.claim}}, it.path, it.read_only))
    for index, secret in enumerate(secret_names(job.spec.secrets.values())):
        listed.append((f"secret-{index}", {"secret": {"secretName": secret}}, f"{names.SECRETS}/{secret}", True))
    volumes = {volume: {"name": volume, **source} for volume, source, _, _ in listed}
    mounts = [
        {"name": volume, "mountPath": path, **({"readOnly": True} if is_read_only else {})}
        for volume, _, path, is_read_only in listed
    ]
    return list(volumes.values()), mounts


def secret_names(references: Sequence[str] | Any) -> list[str]:
    """The Kubernetes secrets among references, each once."""
    # k8s:SECRET/KEY: the whole secret is mounted, and the worker reads the key.
    named = (it.removeprefix("k8s:").partition("/")[0] for it in references if it.startswith("k8s:"))
    return list(dict.fromkeys(named))


def fetch_script() -> str:
    """The text of the script by which pods fetch the code."""
    return pod_script(FETCH_SCRIPT)


@cache
def pod_script(name: str) -> str:
    """The text of a script that pods run before they have any code of ours."""
    return (files("sm_llm") / "worker" / "kubeflow" / name).read_text(encoding="utf-8")
