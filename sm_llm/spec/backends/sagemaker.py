"""Options of the SageMaker backend: training jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from sm_llm.errors import Issue
from sm_llm.spec.backends.base import BackendOptions, InstanceGroup, VpcSpec
from sm_llm.spec.field_classes import PLACEMENT
from sm_llm.spec.machines.compute import unknown_type
from sm_llm.spec.machines.hardware import nearest_instance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.spec.machines.compute import ComputeSpec

_DOWNLOAD_SHARE = 0.05
# Room for what SageMaker counts before the worker's process begins: a share of the limit, and so much at most.
_DOWNLOAD_SECONDS = 600.0


class SageMakerOptions(BackendOptions):
    """A SageMaker training job. null takes the user's default, then the defaults file of the SageMaker SDK."""

    mounts_inputs: ClassVar[bool] = True
    secret_keeper: ClassVar[str] = "ssm"
    account_fields: ClassVar[frozenset[str]] = frozenset({"role", "region", "bucket", "vpc"})

    name: Annotated[Literal["sagemaker"], PLACEMENT] = "sagemaker"
    """The backend."""
    role: str | None = None
    """ARN of the IAM role that the job assumes."""
    region: str | None = None
    """AWS region; null leaves it to AWS's own settings."""
    bucket: str | None = None
    """Bucket for code bundles and job files; null keeps them in the storage."""
    image: Annotated[Literal["stock", "built"], PLACEMENT] = "stock"
    """``stock``: an AWS container, what it lacks is installed once per node; ``built``: ours, nothing is installed."""
    image_version: Annotated[str | None, PLACEMENT] = None
    """Which image of the table: PyTorch's version, for Trainium that of the Neuron SDK; null takes the
    newest that we train with and whose address is published."""
    image_uri: Annotated[str | None, PLACEMENT] = None
    """Image to run, in place of one from the table of images; ``built`` needs it."""
    wheelhouse: str | None = None
    """S3 prefix with wheels to install from; null asks the package index."""
    vpc: VpcSpec = Field(default_factory=VpcSpec)
    """The network."""
    encrypt_inter_container_traffic: bool = False
    """Encrypt traffic between nodes (slows collectives)."""
    output_kms_key_id: str | None = Field(default=None, min_length=1)
    """KMS key for what SageMaker itself writes to S3."""
    volume_kms_key_id: str | None = Field(default=None, min_length=1)
    """KMS key of the storage volume; only for instance types without NVMe disks, which encrypt by themselves."""
    volume_size_gb: int | None = Field(default=None, ge=1, le=16384)
    """Size of the storage volume; null means 100, or 30 where NVMe disks stand in for it."""
    max_run_seconds: int | None = Field(default=None, ge=1)
    """The job ends after this time; null derives it from the plan, where the plan knows the work."""
    spot: bool = False
    """Managed spot capacity: cheaper, and interrupted at any time."""
    max_wait_seconds: int | None = Field(default=None, ge=1)
    """Spot only: longest time for waiting and running together; null means max_run_seconds and a day of waiting."""
    keep_alive_period_in_seconds: int | None = Field(default=None, ge=1)
    """Keep the instances as a warm pool for this long after the job; billed."""
    training_plan_arn: str | None = None
    """Training plan (reserved capacity) to run in."""
    max_retry_attempts: int | None = Field(default=None, ge=1)
    """How often SageMaker starts the job again after an internal server error; null never."""
    instance_groups: Annotated[list[InstanceGroup], PLACEMENT] = Field(default_factory=list)
    """Nodes of several types or reservations; compute.instance_type is one of the types. Plans follow the slowest."""
    base_job_name: str | None = Field(default=None, min_length=1)
    """The job's name begins with this; null means the specification's name."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the job, beside our own."""
    metric_definitions: bool = True
    """Let CloudWatch read the training line (loss, tokens/s, learning rate, …)."""
    remote_debug: bool = False
    """Allow a shell in the running container (``sm-llm shell``)."""

    @property
    def stop_seconds(self) -> float:
        """SageMaker sends SIGTERM and kills after 120 s, on a stop and on a spot interruption."""
        return 120.0

    @property
    def time_limit(self) -> str:
        """The value of ``max_run_seconds`` and its path."""
        return f"{self.max_run_seconds:,} s (backend.max_run_seconds)" if self.max_run_seconds is not None else ""

    @property
    def node_groups(self) -> Sequence[InstanceGroup]:
        """``instance_groups``."""
        return self.instance_groups

    @property
    def seconds_until_stop(self) -> float | None:
        """When the worker stops in order because of ``max_run_seconds``, in seconds from the start of its process.

        Early enough to save and publish, with room for what the service counted before the process began, but never
        in the first half of the limit.
        """
        limit = self.max_run_seconds
        if limit is None:
            return None
        # The limit counts from before the download of image and data, and the worker counts from its own start.
        room = self.stop_seconds + min(_DOWNLOAD_SECONDS, _DOWNLOAD_SHARE * limit)
        return max(limit - room, limit / 2)

    @property
    def read_locations(self) -> Mapping[str, str]:
        """The wheels that nodes install from, where they are not those of the package index."""
        return {} if self.wheelhouse is None else {"wheelhouse": self.wheelhouse}

    def compute_issues(self, compute: ComputeSpec) -> Iterator[Issue]:
        """Issues of the instance type, and of those of all groups. The number of processes follows from it."""
        path, name = "compute.instance_type", compute.instance_type
        if name is None:
            # The specification keeps one type beside the groups: processes and image follow from it.
            own = [group.instance_type for group in self.instance_groups]
            remedy = f"Write {own[0]}, a type of backend.instance_groups" if own else "For example ml.p5.48xlarge"
            yield Issue("instance-type-missing", path, "no instance type", remedy=remedy)
        else:
            yield from _type_issues(path, name, compute.processes_per_instance)
        for index, group in enumerate(self.instance_groups):
            where = f"backend.instance_groups.{index}.instance_type"
            yield from _type_issues(where, group.instance_type, compute.processes_per_instance)


def _type_issues(path: str, name: str, processes: int | None) -> Iterator[Issue]:
    # EC2's own names, without ml., are found as well.
    meant = nearest_instance(name)
    # The SDK takes these in place of a type and starts docker compose.
    if name in ("local", "local_gpu"):
        problem = "is the local mode of the SDK, which is not supported"
        remedy = "Emulate the training job here: backend.name=local backend.contract=sagemaker; or write an ml. type"
        yield Issue("instance-type-local", path, problem, name, remedy)
    elif not name.startswith("ml."):
        yield Issue(
            "instance-type-without-prefix",
            path,
            "SageMaker's names begin with ml.",
            name,
            f"Write {meant.name if meant else f'ml.{name}'}",
        )
    else:
        yield from unknown_type(path, name, processes)
