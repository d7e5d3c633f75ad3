"""Options of the Slurm backend: HyperPod, ParallelCluster or any other cluster with Slurm."""

from __future__ import annotations

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

# What Slurm takes in names, features and lists of them; a space would end the value in an #SBATCH line.
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+:=&|*,()\[\]-]*")
# No leading hyphen, which ssh would read as an option.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]*")
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./:@#+-]*")
_NOT_IN_PATHS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029:,\\]")


def _word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError("must be one word of letters, digits and _ . @ + : = & | * , ( ) [ ] -")
    return value


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("must be a host as ssh takes it, [user@]host or a name of ~/.ssh/config")
    return value


def _path(value: str) -> str:
    if not value.startswith("/") or ".." in value.split("/") or len(value) > 1_000:
        raise ValueError("must be an absolute path on the cluster, without ..")
    if (found := _NOT_IN_PATHS.search(value)) is not None:
        raise ValueError(f"must not hold {found[0]!r}: Slurm and pyxis separate paths by it")
    return value.rstrip("/") or "/"


def _image(value: str) -> str:
    if not _IMAGE.fullmatch(value):
        raise ValueError("must be the path of a .sqsh file, or REGISTRY#REPOSITORY:TAG")
    if value.startswith("/"):
        if not value.endswith(".sqsh"):
            raise ValueError("must end with .sqsh if it is a file")
        return _path(value)
    registry, slash, rest = value.partition("/")
    # enroot separates the registry by #; behind a slash it would search all of the name on Docker Hub.
    if slash and "." in registry and "#" not in value:
        raise ValueError(f"must have # between registry and repository: {registry}#{rest}")
    return value


def _mount(value: str) -> str:
    source, *rest = value.split(":")
    # Any flag that has the right form: only the written ones are checked.
    flags = rest[1] if len(rest) == 2 else "ro"
    if len(rest) > 2 or not re.fullmatch(r"[a-z]+(\+[a-z]+)*", flags):
        raise ValueError("must be FOLDER, FOLDER:PLACE or FOLDER:PLACE:FLAGS, flags joined by +")
    for path in (source, *rest[:1]):
        _path(path)
    return value


Word = Annotated[str, Field(max_length=200), AfterValidator(_word)]
Host = Annotated[str, AfterValidator(_host)]
ClusterPath = Annotated[str, AfterValidator(_path)]


class SlurmAccess(SpecModel):
    """Which nodes of which cluster, for whoever only asks about them."""

    ssh_host: Host | None = None
    partition: Word | None = None


class SlurmOptions(BackendOptions):
    """A Slurm cluster, reached from its login node or over SSH."""

    secret_keeper: ClassVar[str] = "secretsmanager"

    name: Annotated[Literal["slurm"], PLACEMENT] = "slurm"
    """The backend."""
    shared_folder: ClusterPath
    """Folder that the login node and all nodes see at this path; code, job files and logs lie below it."""
    ssh_host: Host | None = None
    """Login node, as ssh takes it; null runs Slurm's commands on this machine."""
    partition: Word | None = None
    """Partition; null takes the cluster's default."""
    account: Word | None = None
    """Account that the job is charged to."""
    qos: Word | None = None
    """Quality of service."""
    reservation: Word | None = None
    """Reservation to run in."""
    constraint: Word | None = None
    """Features that the nodes must have."""
    exclusive: bool = True
    """Take whole nodes, with all their processors, memory and accelerators."""
    cpus_per_node: int | None = Field(default=None, ge=1, le=4_096)
    """Processors of each node; null takes all of a whole node, and Slurm's default of a shared one."""
    gpus_per_node: int | None = Field(default=None, ge=1, le=64)
    """GPUs to ask Slurm for (``--gpus-per-node``); whole nodes come with all of theirs."""
    time_limit_minutes: int | None = Field(default=None, ge=5, le=527_040)
    """The job ends after this time; null takes the partition's limit."""
    signal_seconds: int | None = Field(default=None, ge=60, le=3_600)
    """So long before the time limit the job saves and stops; null means 180. Slurm checks limits about once a minute.
    """
    retry: Literal["requeue", "auto-resume", "none"] = "requeue"
    """Who starts the job again after a fault of a node: Slurm (also at the time limit), HyperPod, or nobody."""
    max_requeues: int | None = Field(default=None, ge=0, le=10_000)
    """How often Slurm may start the job again, at its time limit included; null means 20."""
    stop_seconds: float = Field(default=30.0, gt=0, le=86_400)
    """The cluster's KillWait: time from SIGTERM until what still runs is killed."""
    container_image: Annotated[str, PLACEMENT, AfterValidator(_image)] | None = None
    """Image for pyxis: the path of a .sqsh file, or REGISTRY#REPOSITORY:TAG."""
    container_mounts: list[Annotated[str, AfterValidator(_mount)]] = Field(default_factory=list)
    """Further folders that the container sees; those that the specification names are mounted anyway."""
    virtual_environment: Annotated[ClusterPath | None, PLACEMENT] = None
    """Virtual environment that all nodes see, in place of a container."""
    scratch_folder: ClusterPath = "/tmp"
    """Folder on a disk of each node, for staged inputs, caches and checkpoints on their way to the storage."""

    @property
    def sees_this_machine(self) -> bool:
        """On a login node the folders of the cluster are those of this machine."""
        return self.ssh_host is None

    def compute_issues(self, compute: ComputeSpec) -> Iterator[Issue]:
        """An instance type that is not in the table, without the number of processes."""
        # Without a type, partition and gpus_per_node choose the nodes.
        if compute.instance_type is not None:
            yield from unknown_type("compute.instance_type", compute.instance_type, compute.processes_per_instance)
