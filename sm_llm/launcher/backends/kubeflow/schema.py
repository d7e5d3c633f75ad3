"""The documented fields of what a manifest may hold: closed, so that a misspelt one is found.

The API server drops unknown fields of custom resources without a word. Sources: Kubernetes' API reference (v1), the
Go types of Kubeflow's training operator 1.9, the fields of HyperPodPyTorchJob in HyperPod's command line 3.12.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

DNS_1035 = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?|e[0-9]+)?")


def _quantity(value: Any) -> Any:
    # Before the types are tried: a union would report each of them, at a path that names it.
    if isinstance(value, bool) or not isinstance(value, str | int) or not _QUANTITY.fullmatch(str(value)):
        raise ValueError("must be a quantity of 0 or more, like 4, 500m or 64Gi")
    return value


Quantity = Annotated[str | int, BeforeValidator(_quantity)]
Texts = dict[str, str]
# A qualified name: an optional DNS subdomain and a name of 63 characters.
LabelKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
    ),
]
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Labels = dict[LabelKey, LabelValue]
Annotations = dict[LabelKey, str]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=1)]
Processes = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|gpu|[1-9][0-9]*)$")]
CleanPodPolicy = Literal["All", "Running", "None"]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Metadata(_Closed):
    """Of a job or a ConfigMap."""

    name: Annotated[str, StringConstraints(pattern=DNS_1035, max_length=63)]
    namespace: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    labels: Labels = {}
    annotations: Annotations = {}


class TemplateMetadata(_Closed):
    """Of pods, whose names the operator makes."""

    labels: Labels = {}
    annotations: Annotations = {}


class _FieldReference(_Closed):
    fieldPath: str
    apiVersion: str = "v1"


class _Key(_Closed):
    name: str
    key: str
    optional: bool = False


class _ValueFrom(_Closed):
    fieldRef: _FieldReference | None = None
    secretKeyRef: _Key | None = None
    configMapKeyRef: _Key | None = None


class EnvVariable(_Closed):
    """An environment variable."""

    name: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: str = ""
    valueFrom: _ValueFrom | None = None


class _Mount(_Closed):
    name: str
    mountPath: Annotated[str, StringConstraints(pattern=r"^/[^:]*$")]
    readOnly: bool = False
    subPath: str = ""


class Resources(_Closed):
    """Equal requests and limits are a rule of ``manifest_check``."""

    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}


class _Port(_Closed):
    containerPort: Annotated[int, Field(ge=1, le=65_535)]
    name: str = ""
    protocol: Literal["TCP", "UDP", "SCTP"] = "TCP"


class Container(_Closed):
    """One container of a pod."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    image: Annotated[str, Field(min_length=1)]
    imagePullPolicy: Literal["Always", "IfNotPresent", "Never"] | None = None
    command: list[str] = []
    args: list[str] = []
    workingDir: str = ""
    env: list[EnvVariable] = []
    ports: list[_Port] = []
    resources: Resources = Resources()
    volumeMounts: list[_Mount] = []
    terminationMessagePath: str = ""
    terminationMessagePolicy: Literal["File", "FallbackToLogsOnError"] = "File"


class _EmptyDirectory(_Closed):
    medium: Literal["", "Memory"] = ""
    sizeLimit: Quantity | None = None


class _HostPath(_Closed):
    path: str
    type: Literal["", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"]


class _ConfigMapSource(_Closed):
    name: str
    defaultMode: int = 0o644
    optional: bool = False


class _SecretSource(_Closed):
    secretName: str
    defaultMode: int = 0o644
    optional: bool = False


class _ClaimSource(_Closed):
    claimName: str
    readOnly: bool = False


class Volume(_Closed):
    """One volume of a pod, of one source."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
    emptyDir: _EmptyDirectory | None = None
    hostPath: _HostPath | None = None
    configMap: _ConfigMapSource | None = None
    secret: _SecretSource | None = None
    persistentVolumeClaim: _ClaimSource | None = None


class _Toleration(_Closed):
    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    tolerationSeconds: int | None = None


class _Reference(_Closed):
    name: str


class PodSpec(_Closed):
    """What a pod runs."""

    containers: Annotated[list[Container], Field(min_length=1)]
    initContainers: list[Container] = []
    volumes: list[Volume] = []
    nodeSelector: Labels = {}
    tolerations: list[_Toleration] = []
    serviceAccountName: str = ""
    imagePullSecrets: list[_Reference] = []
    priorityClassName: str = ""
    restartPolicy: Literal["Always", "OnFailure", "Never"] | None = None
    terminationGracePeriodSeconds: Count = 30
    hostNetwork: bool = False
    hostIPC: bool = False


class Template(_Closed):
    """Pods as an operator makes them."""

    metadata: TemplateMetadata = TemplateMetadata()
    spec: PodSpec


class Replicas(_Closed):
    """Pods of one type of a PyTorchJob."""

    replicas: Count = 1
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"] = "OnFailure"
    template: Template


class _SchedulingPolicy(_Closed):
    minAvailable: Count | None = None
    queue: str = ""
    minResources: dict[str, Quantity] = {}
    priorityClass: str = ""
    scheduleTimeoutSeconds: Count | None = None


class RunPolicy(_Closed):
    """How a PyTorchJob ends."""

    cleanPodPolicy: CleanPodPolicy = "None"
    ttlSecondsAfterFinished: Count | None = None
    activeDeadlineSeconds: Seconds | None = None
    backoffLimit: Count | None = None
    suspend: bool = False
    schedulingPolicy: _SchedulingPolicy | None = None


class _Setting(_Closed):
    key: str
    value: str


class ElasticPolicy(_Closed):
    """A number of workers that may change."""

    rdzvBackend: Literal["c10d", "etcd", "etcd-v2"] = "c10d"
    rdzvHost: str | None = None
    rdzvPort: Annotated[int, Field(ge=1, le=65_535)] | None = None
    rdzvId: str | None = None
    rdzvConf: list[_Setting] = []
    minReplicas: Seconds | None = None
    maxReplicas: Seconds | None = None
    maxRestarts: Count | None = None
    nProcPerNode: Seconds | None = None
    standalone: bool = False


class PyTorchJobSpec(_Closed):
    """Of Kubeflow's training operator. Its replica types are a rule of ``manifest_check``."""

    nprocPerNode: Processes | None = None
    runPolicy: RunPolicy = RunPolicy()
    elasticPolicy: ElasticPolicy | None = None
    pytorchReplicaSpecs: dict[str, Replicas]


class _LogRule(_Closed):
    name: str
    logPattern: str
    expectedStartCutOffInSeconds: Seconds | None = None
    expectedRecurringFrequencyInSeconds: Seconds | None = None
    metricThreshold: int | None = None
    metricEvaluationDataPoints: Seconds | None = None
    operator: Literal["gt", "lt", "eq", "gteq", "lteq"] | None = None
    stopPattern: str | None = None


class _RestartPolicy(_Closed):
    evalPeriodSeconds: Seconds
    maxFullJobRestarts: Count | None = None
    numRestartBeforeFullJobRestart: Count | None = None


class HyperPodRunPolicy(_Closed):
    """How a HyperPodPyTorchJob ends."""

    cleanPodPolicy: CleanPodPolicy = "All"
    ttlSecondsAfterFinished: Annotated[int, Field(ge=-1)] = 0
    activeDeadlineSeconds: Seconds | None = None
    jobMaxRetryCount: Count | None = None
    restartPolicy: _RestartPolicy | None = None
    startupDeadlineSeconds: Seconds | None = None
    faultDeadlineSeconds: Seconds | None = None
    logMonitoringConfiguration: list[_LogRule] = []
    suspend: bool = False


class HyperPodReplicas(_Closed):
    """Pods of a HyperPodPyTorchJob."""

    name: str
    replicas: Count = 0
    spares: Count = 0
    maxReplicas: Count | None = None
    template: Template


class HyperPodJobSpec(_Closed):
    """Of HyperPod's training operator."""

    nprocPerNode: Processes = "auto"
    runPolicy: HyperPodRunPolicy = HyperPodRunPolicy()
    replicaSpecs: Annotated[list[HyperPodReplicas], Field(min_length=1)]


class PyTorchJob(_Closed):
    """The custom resource of Kubeflow's training operator, version 1."""

    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: PyTorchJobSpec


class HyperPodPyTorchJob(_Closed):
    """The custom resource of HyperPod's training operator."""

    apiVersion: Literal["sagemaker.amazonaws.com/v1"]
    kind: Literal["HyperPodPyTorchJob"]
    metadata: Metadata
    spec: HyperPodJobSpec


class ConfigMap(_Closed):
    """Files for pods; 1 MiB in all."""

    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: Texts


class BatchJobSpec(_Closed):
    """Of Kubernetes' own Job."""

    backoffLimit: Count = 6
    ttlSecondsAfterFinished: Count | None = None
    template: Template


class BatchJob(_Closed):
    """Kubernetes' own Job, in which the driver of a workflow runs."""

    apiVersion: Literal["batch/v1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: BatchJobSpec


class ServiceAccount(_Closed):
    """What a pod is to the API server."""

    apiVersion: Literal["v1"]
    kind: Literal["ServiceAccount"]
    metadata: Metadata


class _Rule(_Closed):
    apiGroups: list[str]
    resources: list[str]
    verbs: list[Literal["create", "get", "list", "watch", "update", "patch", "delete"]]


class Role(_Closed):
    """What may be done in a namespace."""

    apiVersion: Literal["rbac.authorization.k8s.io/v1"]
    kind: Literal["Role"]
    metadata: Metadata
    rules: list[_Rule]


class _RoleReference(_Closed):
    apiGroup: Literal["rbac.authorization.k8s.io"]
    kind: Literal["Role", "ClusterRole"]
    name: str


class _Subject(_Closed):
    kind: Literal["ServiceAccount"]
    name: str
    namespace: str


class RoleBinding(_Closed):
    """Who may do it."""

    apiVersion: Literal["rbac.authorization.k8s.io/v1"]
    kind: Literal["RoleBinding"]
    metadata: Metadata
    roleRef: _RoleReference
    subjects: list[_Subject]
