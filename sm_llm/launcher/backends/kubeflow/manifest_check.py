"""Checks a manifest before it is sent: closed schema, the rules of the operators' webhooks, and those of pods.

The API server takes most mistakes: unknown fields are dropped, other values reach an operator that does nothing.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from sm_llm.errors import Issue
from sm_llm.launcher.backends.kubeflow.names import CONTAINER
from sm_llm.launcher.backends.kubeflow.schema import (
    BatchJob,
    ConfigMap,
    HyperPodPyTorchJob,
    PodSpec,
    PyTorchJob,
    Role,
    RoleBinding,
    ServiceAccount,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.spec.validation.runner import Checker

_MODELS: dict[str, type[BaseModel]] = {
    "PyTorchJob": PyTorchJob,
    "HyperPodPyTorchJob": HyperPodPyTorchJob,
    "ConfigMap": ConfigMap,
    "Job": BatchJob,
    "ServiceAccount": ServiceAccount,
    "Role": Role,
    "RoleBinding": RoleBinding,
}
# Of a ConfigMap's data.
_MOST_BYTES = 1 << 20
# In the name of a resource that is a device.
_EXTENDED = "/"


def manifest_issues(manifest: Mapping[str, Any]) -> list[Issue]:
    """Everything that is wrong with a manifest of a kind that we send, each with its dotted path."""
    kind = manifest.get("kind")
    model = _MODELS.get(kind) if isinstance(kind, str) else None
    if model is None:
        remedy = f"Use {', '.join(_MODELS)}"
        return [Issue("manifest-kind-unknown", "kind", "is not a kind of ours", kind, remedy)]
    try:
        found = model.model_validate(manifest)
    except ValidationError as error:
        return [_issue(model, it) for it in error.errors()]
    if isinstance(found, PyTorchJob):
        return list(_job_issues(found))
    if isinstance(found, HyperPodPyTorchJob):
        return list(_hyperpod_issues(found))
    if isinstance(found, BatchJob):
        return list(_batch_issues(found))
    return list(_map_issues(found)) if isinstance(found, ConfigMap) else []


def check_manifests(manifests: Sequence[Mapping[str, Any]]) -> Iterator[Issue]:
    """What the cluster would refuse, or drop, of the manifests of a job."""
    for manifest in manifests:
        yield from manifest_issues(manifest)


REQUEST_CHECKERS: tuple[Checker[Sequence[Mapping[str, Any]]], ...] = (check_manifests,)


def _issue(model: type[BaseModel], error: Any) -> Issue:
    """One error of pydantic; an unknown field with the nearest known one."""
    path = ".".join(str(it) for it in error["loc"])
    if error["type"] == "extra_forbidden":
        close = get_close_matches(str(error["loc"][-1]), _fields_at(model, error["loc"][:-1]), n=1)
        remedy = f"Did you mean {close[0]}?" if close else "Leave it out"
        return Issue("manifest-field-unknown", path, "is not a documented field", error["input"], remedy)
    if error["type"] == "missing":
        return Issue("manifest-field-missing", path, "is missing", remedy="Add it")
    return Issue("manifest-value-invalid", path, f"is not valid: {error['msg']}", error["input"], "Correct it")


def _fields_at(model: Any, location: tuple[int | str, ...]) -> list[str]:
    """The fields of the model at a place of another; empty where it is not one."""
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = _inner(model.model_fields[str(part)].annotation)
        # A key of a mapping, or an index of a list, leads to no other model.
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _inner(annotation: Any) -> Any:
    """The model inside a list, a mapping or an optional value."""
    arguments = getattr(annotation, "__args__", ())
    inner = (_inner(it) for it in arguments)
    models = (it for it in inner if isinstance(it, type) and issubclass(it, BaseModel))
    return annotation if isinstance(annotation, type) and not arguments else next(models, None)


def _job_issues(job: PyTorchJob) -> Iterator[Issue]:
    """The rules of the training operator's webhook."""
    replicas = job.spec.pytorchReplicaSpecs
    prefix = "spec.pytorchReplicaSpecs"
    for name in replicas:
        if name not in ("Master", "Worker"):
            remedy = "Use Master, Worker or both"
            yield Issue("manifest-replica-type", f"{prefix}.{name}", "is not a replica type", name, remedy)
    if not replicas:
        yield Issue("manifest-replica-type", prefix, "is empty", remedy="Add Master, Worker or both")
    master, worker = replicas.get("Master"), replicas.get("Worker")
    # Two masters would both take rank 0.
    if master is not None and master.replicas != 1:
        yield Issue("manifest-replicas", f"{prefix}.Master.replicas", "must be 1", master.replicas, "Use workers")
    if worker is not None and worker.replicas < 1:
        remedy = "Leave Worker out, or raise it"
        yield Issue("manifest-replicas", f"{prefix}.Worker.replicas", "must be at least 1", worker.replicas, remedy)
    yield from _elastic_issues(job)
    for name, it in replicas.items():
        yield from _pod_issues(it.template.spec, f"{prefix}.{name}.template.spec")


def _elastic_issues(job: PyTorchJob) -> Iterator[Issue]:
    elastic = job.spec.elasticPolicy
    if elastic is None:
        return
    if "Worker" not in job.spec.pytorchReplicaSpecs:
        yield Issue("manifest-elastic", "spec.elasticPolicy", "needs workers", remedy="Add Worker")
    if elastic.nProcPerNode is not None and job.spec.nprocPerNode is not None:
        path, problem = "spec.elasticPolicy.nProcPerNode", "cannot be set beside spec.nprocPerNode"
        yield Issue("manifest-elastic", path, problem, elastic.nProcPerNode, "Use spec.nprocPerNode alone")
    low, high = elastic.minReplicas, elastic.maxReplicas
    if low is not None and high is not None and low > high:
        problem = f"must be at least minReplicas, which is {low}"
        yield Issue("manifest-elastic", "spec.elasticPolicy.maxReplicas", problem, high, "Raise it")


def _hyperpod_issues(job: HyperPodPyTorchJob) -> Iterator[Issue]:
    for index, it in enumerate(job.spec.replicaSpecs):
        prefix = f"spec.replicaSpecs.{index}"
        if it.maxReplicas is not None and it.maxReplicas < it.replicas:
            problem = f"must be at least replicas, which is {it.replicas}"
            yield Issue(
                "manifest-replicas-beyond-maximum", f"{prefix}.maxReplicas", problem, it.maxReplicas, "Raise it"
            )
        yield from _pod_issues(it.template.spec, f"{prefix}.template.spec")


def _batch_issues(job: BatchJob) -> Iterator[Issue]:
    prefix, pod = "spec.template.spec", job.spec.template.spec
    if pod.restartPolicy not in ("OnFailure", "Never"):
        path, remedy = f"{prefix}.restartPolicy", "Name one"
        yield Issue("manifest-restart-policy", path, "must be OnFailure or Never", pod.restartPolicy, remedy)
    yield from _container_issues(pod, prefix)


def _pod_issues(pod: PodSpec, prefix: str) -> Iterator[Issue]:
    """What the operator's webhook demands of pods, and what the API server does."""
    if not any(it.name == CONTAINER for it in pod.containers):
        listed = ", ".join(it.name for it in pod.containers)
        remedy = f"Name one of them {CONTAINER}"
        yield Issue("manifest-container-name", f"{prefix}.containers", f"has no container {CONTAINER}", listed, remedy)
    yield from _container_issues(pod, prefix)


def _container_issues(pod: PodSpec, prefix: str) -> Iterator[Issue]:
    # The API server checks this in pods, and not in a custom resource: the operator would fail to create them.
    volumes = {it.name for it in pod.volumes}
    yield from _repeated({f"{prefix}.volumes.{index}.name": it.name for index, it in enumerate(pod.volumes)})
    # Init containers and containers share one set of names.
    groups = (("initContainers", pod.initContainers), ("containers", pod.containers))
    yield from _repeated(
        {f"{prefix}.{group}.{index}.name": it.name for group, found in groups for index, it in enumerate(found)}
    )
    for group, containers in (("containers", pod.containers), ("initContainers", pod.initContainers)):
        for index, it in enumerate(containers):
            at = f"{prefix}.{group}.{index}"
            yield from _resource_issues(it.resources.requests, it.resources.limits, f"{at}.resources")
            yield from _repeated({f"{at}.env.{number}.name": row.name for number, row in enumerate(it.env)})
            yield from _repeated(
                {f"{at}.volumeMounts.{number}.mountPath": row.mountPath for number, row in enumerate(it.volumeMounts)}
            )
            for number, mount in enumerate(it.volumeMounts):
                if mount.name not in volumes:
                    remedy = "Add the volume, or correct the name"
                    path = f"{at}.volumeMounts.{number}.name"
                    yield Issue("manifest-volume-missing", path, "names no volume of the pod", mount.name, remedy)
    for index, volume in enumerate(pod.volumes):
        sources = sorted(volume.model_fields_set - {"name"})
        if len(sources) != 1:
            problem = "must have exactly one source"
            yield Issue("manifest-volume-source", f"{prefix}.volumes.{index}", problem, sources, "Keep one")


def _repeated(values: Mapping[str, str]) -> Iterator[Issue]:
    """Path -> value: those that are there before. Of a variable the last one would win, the rest are refused."""
    seen: dict[str, str] = {}
    for path, value in values.items():
        if (first := seen.setdefault(value, path)) != path:
            yield Issue("manifest-given-twice", path, f"is given already at {first}", value, "Keep one")


def _resource_issues(requests: Mapping[str, Any], limits: Mapping[str, Any], prefix: str) -> Iterator[Issue]:
    for name in sorted({*requests, *limits}):
        asked, limit = requests.get(name), limits.get(name)
        # Of a device without a request Kubernetes takes the limit; every other difference it refuses, or evicts by.
        if str(asked) != str(limit) and not (asked is None and _EXTENDED in name):
            problem = f"must be equal to the request, which is {asked}"
            yield Issue("manifest-resources-differ", f"{prefix}.limits.{name}", problem, limit, "Give both one value")
        if _EXTENDED in name and limit is not None and not str(limit).isdecimal():
            problem = "must be a whole number: it is a device"
            yield Issue("manifest-device-divided", f"{prefix}.limits.{name}", problem, limit, "Correct it")


def _map_issues(found: ConfigMap) -> Iterator[Issue]:
    # The limit is that of etcd's objects, counted in bytes.
    size = sum(len(key.encode()) + len(value.encode()) for key, value in found.data.items())
    if size > _MOST_BYTES:
        problem = f"holds more than {_MOST_BYTES:,} bytes"
        yield Issue("manifest-too-large", "data", problem, size, "Make the specification smaller")
