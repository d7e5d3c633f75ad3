"""Options of the Kubernetes backend: HyperPod on EKS, or any cluster with a PyTorch job operator."""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from sm_llm.spec.backends.base import BackendOptions
from sm_llm.spec.base import SpecModel
from sm_llm.spec.field_classes import PLACEMENT
from sm_llm.spec.machines.compute import unknown_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.errors import Issue
    from sm_llm.spec.machines.compute import ComputeSpec

# Kubernetes' own forms: a label (RFC 1123), a subdomain, and a qualified name with an optional prefix.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:@-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _label(value: str) -> str:
    if not _LABEL.fullmatch(value):
        raise ValueError("must be at most 63 small letters, digits and -, with a letter or digit at both ends")
    return value


def _subdomain(value: str) -> str:
    if len(value) > 253 or not all(_LABEL.fullmatch(it) for it in value.split(".")):
        raise ValueError("must be at most 253 small letters, digits, - and ., with a letter or digit at both ends")
    return value


def _label_key(value: str) -> str:
    prefix, slash, name = value.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and _subdomain(prefix) != prefix):
        raise ValueError("must be NAME or PREFIX/NAME, NAME at most 63 letters, digits and _ . -")
    return value


def _label_value(value: str) -> str:
    if value and not _NAME.fullmatch(value):
        raise ValueError("must be at most 63 letters, digits and _ . -, with a letter or digit at both ends")
    return value


def _image(value: str) -> str:
    if not _IMAGE.fullmatch(value) or len(value) > 500:
        raise ValueError("must be REGISTRY/REPOSITORY:TAG or REGISTRY/REPOSITORY@DIGEST")
    return value


def _path(value: str) -> str:
    # Kubernetes refuses a colon in a mountPath, and .. would lead out of the mount.
    if not value.startswith("/") or ".." in value.split("/") or ":" in value or len(value) > 1_000:
        raise ValueError("must be an absolute path, without .. and :")
    if _CONTROL.search(value):
        raise ValueError("must not hold control characters")
    # In one form, because mounts are compared as text.
    return posixpath.normpath(re.sub("/+", "/", value))


def _context(value: str) -> str:
    if not value or _CONTROL.search(value) or len(value) > 500:
        raise ValueError("must be the name of a context, without control characters")
    return value


Label = Annotated[str, AfterValidator(_label)]
Subdomain = Annotated[str, AfterValidator(_subdomain)]
LabelKey = Annotated[str, AfterValidator(_label_key)]
LabelValue = Annotated[str, AfterValidator(_label_value)]
PodPath = Annotated[str, AfterValidator(_path)]
TopologyLevel = Literal[
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "topology.k8s.aws/ultraserver-id",
]


class VolumeSpec(SpecModel):
    """A persistent volume claim, e.g. of FSx for Lustre, in every pod."""

    claim: Subdomain
    """Name of the claim, in the namespace of the job."""
    path: PodPath
    """Where the pods see it."""
    read_only: bool = False
    """Mount it read-only."""


class TolerationSpec(SpecModel):
    """A taint of nodes that the pods tolerate."""

    key: LabelKey | None = None
    """Key of the taint; null with operator Exists tolerates all."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """Whether the value must be equal, or any."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null means every one."""


class KubeflowAccess(SpecModel):
    """Which cluster, for whoever only asks about its nodes."""

    context: Annotated[str, AfterValidator(_context)] | None = None


class KubeflowOptions(BackendOptions):
    """A Kubernetes cluster with Kubeflow's or HyperPod's training operator."""

    secret_keeper: ClassVar[str] = "k8s"

    name: Annotated[Literal["kubeflow"], PLACEMENT] = "kubeflow"
    """The backend."""
    image: Annotated[str, PLACEMENT, AfterValidator(_image)]
    """Container image, with python3, torch and boto3."""
    context: Annotated[str, AfterValidator(_context)] | None = None
    """Context of the kubeconfig; null takes the current one, or the cluster that this process runs in."""
    namespace: Label = "default"
    """Namespace of the job; with task governance of HyperPod ``hyperpod-ns-TEAM``."""
    resource: Literal["PyTorchJob", "HyperPodPyTorchJob"] = "PyTorchJob"
    """Custom resource that is created: Kubeflow's, or that of HyperPod's training operator."""
    image_pull_secrets: list[Subdomain] = Field(default_factory=list, max_length=20)
    """Secrets with credentials of the registry."""
    service_account: Subdomain | None = None
    """Service account of the pods; it brings the IAM role by which they reach S3."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict)
    """Further labels that the nodes must have."""
    instance_label: Literal["hyperpod", "ec2", "none"] = "hyperpod"
    """How the nodes' label spells an instance type: ml.p5.48xlarge on HyperPod, p5.48xlarge on other nodes of EKS; none
    leaves the choice of nodes to node_selector and the devices."""
    node_health: Literal["any", "schedulable", "deep-checked"] = "any"
    """Nodes by the health labels of HyperPod: any, those it calls Schedulable, or those whose deep check has passed."""
    tolerations: list[TolerationSpec] = Field(default_factory=list, max_length=50)
    """Taints of nodes that the pods tolerate."""
    accelerators_per_pod: Annotated[int | None, PLACEMENT] = Field(default=None, ge=0, le=128)
    """Devices that each pod asks for; null takes all of the instance type. Fewer leave the rest of a node to others."""
    accelerator_resource: LabelKey | None = None
    """Resource name of the devices; null means nvidia.com/gpu, or aws.amazon.com/neurondevice on Trainium."""
    efa_per_pod: int | None = Field(default=None, ge=0, le=64)
    """EFA interfaces that each pod asks for; null takes all of the instance type where there are several pods."""
    cpus_per_pod: int | None = Field(default=None, ge=1, le=1_024)
    """Processors that each pod asks for; null asks for none."""
    memory_gib_per_pod: int | None = Field(default=None, ge=1, le=16_384)
    """Memory that each pod asks for, and may not exceed; null asks for none."""
    shared_memory_gib: int | None = Field(default=None, ge=1, le=16_384)
    """Size of /dev/shm; null means half of the node's memory."""
    volumes: list[VolumeSpec] = Field(default_factory=list, max_length=50)
    """Claims that the pods mount."""
    node_folder: PodPath | None = None
    """Folder of each node on its own NVMe disks, e.g. /opt/dlami/nvme, for staged inputs, caches and checkpoints on
    their way to the storage; null takes the disk that Kubernetes gives to pods."""
    queue: Subdomain | None = None
    """Kueue's local queue that admits the job."""
    priority: Subdomain | None = None
    """Kueue's workload priority class."""
    topology: TopologyLevel | None = None
    """Level of the network topology that Kueue places all pods below."""
    topology_mode: Literal["required", "preferred"] = "required"
    """Whether the job waits for nodes below one such level."""
    retry: Literal["operator", "auto-resume", "none"] = "operator"
    """Who starts pods again that fail: the operator, also with HyperPod's replacement of faulty nodes, or nobody."""
    max_restarts: int | None = Field(default=None, ge=1, le=10_000)
    """How often the job may start again; null means 20."""
    hang_minutes: int | None = Field(default=None, ge=1, le=10_080)
    """HyperPod's operator restarts a training without a logged step for this time; null means 30."""
    first_step_minutes: int | None = Field(default=None, ge=1, le=10_080)
    """The same until the first logged step; null means 120."""
    min_pods: int | None = Field(default=None, ge=1, le=10_000)
    """Fewest pods with which a training continues while others are missing; null means all. Tokens and their order stay
    the same."""
    min_pods_wait_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """How long the pods that are there wait for the others before they continue without; null means 120."""
    time_limit_minutes: int | None = Field(default=None, ge=5, le=527_040)
    """The operator ends the job after this time; null sets no limit."""
    keep_minutes: int = Field(default=10_080, ge=1, le=527_040)
    """How long an ended job, its pods and their logs are kept."""
    stop_seconds: int = Field(default=120, ge=1, le=86_400)
    """Time from SIGTERM until what still runs is killed: the pods' grace period."""

    def compute_issues(self, compute: ComputeSpec) -> Iterator[Issue]:
        """An instance type that is not in the table, without the number of processes."""
        # Without a type, node_selector and accelerators_per_pod choose the nodes.
        if compute.instance_type is not None:
            yield from unknown_type("compute.instance_type", compute.instance_type, compute.processes_per_instance)
