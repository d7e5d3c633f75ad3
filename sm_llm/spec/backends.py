"""Where a job runs; one options class per backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.comparison.classes import PLACEMENT

_DOWNLOAD_SHARE = 0.05
_DOWNLOAD_SECONDS = 600.0
"""Room for what SageMaker counts before the worker's process begins: a share of the limit, and so much at most."""


class VpcSpec(SpecModel):
    """The network that managed jobs run in: both lists, or neither."""

    subnets: list[str] = Field(default_factory=list, max_length=16)
    """Subnet ids."""
    security_group_ids: list[str] = Field(default_factory=list, max_length=5)
    """Security group ids; for EFA one must allow all traffic to and from itself."""


class LocalBackend(SpecModel):
    """This machine, without docker: the container contract in the run's own folder, under torchrun."""

    name: Annotated[Literal["local"], PLACEMENT] = "local"
    """The backend."""
    contract: Annotated[Literal["local", "sagemaker"], PLACEMENT] = "local"
    """``sagemaker`` emulates SageMaker: the request that it would get runs here under its own training toolkit."""
    threads_per_process: Annotated[int | None, PLACEMENT] = Field(default=None, ge=1, le=1_024)
    """CPU threads of each process; null shares the machine's cores out evenly."""
    stop_seconds: float = Field(default=120.0, gt=0, le=86_400)
    """Time from a request to stop until what still runs is killed; a checkpoint is begun only if it fits in."""


class InstanceGroup(SpecModel):
    """Some of the nodes of a job of several instance types or reservations."""

    name: str = Field(min_length=1, max_length=64)
    """Name of the group."""
    instance_type: str
    """Machine to rent."""
    instance_count: int = Field(ge=1, le=10_000)
    """Nodes of the group; all groups together are compute.instance_count."""


class SageMakerBackend(SpecModel):
    """A SageMaker training job. null takes the user's default, then the defaults file of the SageMaker SDK."""

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
    output_kms_key_id: str | None = None
    """KMS key for what SageMaker itself writes to S3."""
    volume_kms_key_id: str | None = None
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
    def seconds_until_stop(self) -> float | None:
        """When the worker stops in order because of ``max_run_seconds``, in seconds from the start of its process.

        Early enough to save and publish, with room for what the service counted before the process began, but never
        in the first half of the limit.
        """
        limit = self.max_run_seconds
        if limit is None:
            return None
        room = self.stop_seconds + min(_DOWNLOAD_SECONDS, _DOWNLOAD_SHARE * limit)
        return max(limit - room, limit / 2)


BackendSpec = Annotated[LocalBackend | SageMakerBackend, Field(discriminator="name")]
