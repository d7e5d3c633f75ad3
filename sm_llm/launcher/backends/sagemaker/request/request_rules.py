"""Rules that neither the SDK nor botocore checks: what belongs together in a training job, found before any upload."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.sagemaker.request.capacity import LONGEST_SECONDS
from sm_llm.launcher.backends.sagemaker.request.request_addresses import (
    address_issues,
    image_issues,
    image_warnings,
    partition_of,
)
from sm_llm.launcher.job_inputs import output_folders
from sm_llm.launcher.planning.local_paths import is_reference, local_folder
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.inputs import FileSystemInput
from sm_llm.spec.job_machines import groups, machine_types, machines
from sm_llm.spec.machines.hardware import instance, nearest_instance
from sm_llm.spec.references import sources
from sm_llm.spec.tasks import ScriptTask, parallelism_of, starts_own_ranks, starts_ranks
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.launcher.backends.sagemaker.request.capacity import TimeLimit
    from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings
    from sm_llm.spec.backends.base import InstanceGroup
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.machines.hardware import Instance


# botocore raises ProfileNotFound for a profile that it finds in no file, before any request.
_NO_FILE = "names a profile of files that the container does not have"
_REFUSED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": ("would hide GPUs from the processes of a node", "Set compute.processes_per_instance"),
    "NVIDIA_VISIBLE_DEVICES": ("would hide GPUs from the container", "Set compute.processes_per_instance"),
    "AWS_PROFILE": (_NO_FILE, "Leave it out: the job has the credentials of backend.role"),
    "AWS_DEFAULT_PROFILE": (_NO_FILE, "Leave it out: the job has the credentials of backend.role"),
}
_WARNED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "HOME")
_OWN_TAGS = "sm_llm:"
# Of an id of EC2, behind the hyphen.
_DIGITS = re.compile(r"[0-9a-f]+")


def unusable_issues(job: JobSpec, found: JobSettings) -> list[Issue]:
    """Issues of a job for SageMaker, not for its emulation on this machine."""
    return [*_variables(job, found), *_tags(found), *_network(found), *_storage(job, found)]


def unusable_warnings(job: JobSpec, found: JobSettings) -> Iterator[Issue]:
    """Variables in whose place the image has its own, and a store that only this machine reaches.

    It is not refused, since stand-ins of the service run their jobs on this machine.
    """
    endpoint = job.storage_options.endpoint_url
    if endpoint is not None and _is_loopback(endpoint):
        why = "is this machine alone: in the job it would be the container itself"
        remedy = "Name an address that the job's network reaches, or run here: backend.name=local"
        yield warning("endpoint-of-this-machine", "storage_options.endpoint_url", f"{endpoint} {why}", remedy=remedy)
    for name, value in {**found.environment, **job.environment}.items():
        if value.startswith(("http://", "https://")) and _is_loopback(value):
            message = f"{value} is this machine alone: in the job it would be the container itself"
            yield warning("variable-names-this-machine", f"environment.{name}", message)
        if name in _WARNED_VARIABLES:
            message = "takes the place of the image's own, which its programs may need"
            yield warning("environment-variable-of-the-image", f"environment.{name}", message)


def _variables(job: JobSpec, found: JobSettings) -> Iterator[Issue]:
    for name, value in {**found.environment, **job.environment}.items():
        if name in _REFUSED_VARIABLES:
            problem, remedy = _REFUSED_VARIABLES[name]
            yield Issue(
                "environment-variable-unusable",
                f"environment.{name}",
                f"cannot be set on SageMaker: it {problem}",
                value,
                remedy,
            )


def _tags(found: JobSettings) -> Iterator[Issue]:
    for name, value in found.tags.items():
        if name.lower().startswith(_OWN_TAGS):
            problem = f"begins with {_OWN_TAGS}, as the tags by which a run is found again"
            yield Issue("tag-prefix-reserved", f"backend.tags.{name}", problem, value, "Rename it")


def _network(found: JobSettings) -> Iterator[Issue]:
    for path, ids, prefix in (
        ("backend.vpc.subnets", found.subnets, "subnet-"),
        ("backend.vpc.security_group_ids", found.security_group_ids, "sg-"),
    ):
        if wrong := [it for it in ids if not it.startswith(prefix)]:
            yield Issue(
                "vpc-id-invalid", path, f"ids begin with {prefix}", wrong[0], "Check which list an id belongs to"
            )
        elif wrong := [it for it in ids if not _DIGITS.fullmatch(it.removeprefix(prefix))]:
            problem = f"an id is {prefix} and hexadecimal digits"
            yield Issue("vpc-id-malformed", path, problem, wrong[0], f"Write for example {prefix}0123456789abcdef0")
        elif len(set(ids)) < len(ids):
            yield Issue("vpc-id-repeated", path, "holds an id twice", list(ids), "Keep one of each")


def _storage(job: JobSpec, found: JobSettings) -> Iterator[Issue]:
    options = job.storage_options
    # A store behind an endpoint of its own has no regions or partitions of AWS.
    if options.endpoint_url is not None or found.region is None:
        return
    try:
        own = partition_of(found.region)
    except ValueError:
        return  # it is reported already
    if options.region is not None:
        try:
            partition = partition_of(options.region)
        except ValueError:
            problem, remedy = "is not a region of AWS", "Write a region such as us-west-2"
            yield Issue("storage-region-unknown", "storage_options.region", problem, options.region, remedy)
            return
        if partition != own:
            problem = f"is of partition {partition}, the job runs in {found.region}, which is of {own}"
            yield Issue(
                "storage-partition-mismatch",
                "storage_options.region",
                problem,
                options.region,
                "Use a bucket of the job's own partition",
            )
    of_bucket, key = options.region or found.region, options.kms_key_id or ""
    parts = key.split(":")
    if len(parts) > 3 and parts[0] == "arn" and parts[1] == own and parts[3] != of_bucket:
        problem = f"is in {parts[3] or 'no region'}, and the bucket in {of_bucket}"
        remedy = f"Name a key in {of_bucket}, or the bucket's region: storage_options.region={parts[3]}"
        yield Issue("storage-key-region-mismatch", "storage_options.kms_key_id", problem, key, remedy)


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # Names below localhost resolve to the loopback interface, too (RFC 6761).
        return host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost")


# Kinds of references that only this machine, or a pod, can resolve.
_LOCAL_SECRETS = ("env:", "file:", "k8s:")


def job_issues(job: JobSpec) -> Iterator[Issue]:
    """Issues of a job that runs on SageMaker, whatever account it runs in."""
    options = SageMakerOptions.of(job)
    yield from _instance_issues(job, options)
    yield from _strategy_issues(job, options)
    yield from _capacity_issues(options)
    yield from _location_issues(job)
    yield from address_issues(job)
    yield from image_issues(job)
    yield from _secret_issues(job)
    if options.image == "built" and options.image_uri is None:
        remedy = "Build and push it with sm-llm image build, sm-llm image push, and give its address"
        yield Issue(
            "built-image-address-missing",
            "backend.image_uri",
            "image: built needs the address of that image",
            remedy=remedy,
        )


def account_issues(job: JobSpec, found: JobSettings, limit: TimeLimit | None) -> Iterator[Issue]:
    """Issues that hang on the account's settings and on how long the job may run."""
    row = next((row for row in machines(job) if row.nvme_gb), None)
    file_systems = [name for name, it in job.inputs.items() if isinstance(it, FileSystemInput)]
    for name in file_systems if not found.subnets else []:
        remedy = "Set backend.vpc.subnets and backend.vpc.security_group_ids to the file system's"
        yield Issue(
            "file-system-without-vpc",
            f"inputs.{name}",
            "a file system can be mounted only inside its network",
            remedy=remedy,
        )
    if found.volume_kms_key_id and row is not None:
        problem = f"{row.name} keeps data on NVMe disks, which have keys of their own; the service refuses this"
        where = found.origins.get("volume_kms_key_id", "")
        yield Issue(
            "volume-key-without-effect",
            "backend.volume_kms_key_id",
            problem,
            found.volume_kms_key_id,
            "Leave it out",
            where,
        )
    if limit is not None:
        yield from _limit_issues(job, limit)


def _limit_issues(job: JobSpec, limit: TimeLimit) -> Iterator[Issue]:
    options = SageMakerOptions.of(job)
    if limit.max_run > LONGEST_SECONDS:
        remedy = "The job saves checkpoints: launch it again to continue"
        yield Issue(
            "time-limit-too-long",
            "backend.max_run_seconds",
            "no training job runs longer than 28 days",
            limit.max_run,
            remedy,
        )
    # MaxWaitTimeInSeconds bounds waiting and running together, and must be at least MaxRuntimeInSeconds.
    if options.max_wait_seconds is None:
        return
    if options.max_wait_seconds > LONGEST_SECONDS:
        problem = "no training job waits and runs for more than 28 days"
        yield Issue(
            "wait-limit-too-long",
            "backend.max_wait_seconds",
            problem,
            options.max_wait_seconds,
            f"Use at most {LONGEST_SECONDS}",
        )
    if not options.spot:
        problem, remedy = "is for spot capacity only", "Set backend.spot to true, or leave it out"
        yield Issue("wait-limit-without-spot", "backend.max_wait_seconds", problem, options.max_wait_seconds, remedy)
    elif options.max_wait_seconds < limit.max_run:
        problem = f"covers waiting and running together, and is shorter than max_run = {limit.max_run} ({limit.reason})"
        yield Issue(
            "wait-limit-too-short",
            "backend.max_wait_seconds",
            problem,
            options.max_wait_seconds,
            f"Use at least {limit.max_run}",
        )


def _instance_issues(job: JobSpec, options: SageMakerOptions) -> Iterator[Issue]:
    processes = job.compute.processes
    if groups(job):
        yield from _group_issues(job, options.instance_groups)
        return
    for row in machines(job):
        if row.accelerator and processes > row.accelerators:
            problem = (
                f"{counted(processes, 'process')} for the {counted(row.accelerators, 'accelerator')} of {row.name}"
            )
            yield Issue(
                "processes-exceed-accelerators",
                "compute.processes_per_instance",
                problem,
                processes,
                f"Use {row.accelerators}",
            )


def _group_issues(job: JobSpec, groups: Sequence[InstanceGroup]) -> Iterator[Issue]:
    total = sum(group.instance_count for group in groups)
    if total != job.compute.instance_count:
        problem = (
            f"the groups have {counted(total, 'node')} together, compute.instance_count is {job.compute.instance_count}"
        )
        yield Issue(
            "group-count-mismatch", "backend.instance_groups", problem, total, f"Set compute.instance_count to {total}"
        )
    if len({group.name for group in groups}) < len(groups):
        yield Issue(
            "group-name-repeated",
            "backend.instance_groups",
            "two groups have one name",
            [group.name for group in groups],
        )
    for index, group in enumerate(groups):
        row = instance(group.instance_type)
        if row is not None and row.processes != job.compute.processes:
            problem = f"runs {counted(row.processes, 'process')} a node, the others {job.compute.processes}"
            yield Issue(
                "group-processes-differ", f"backend.instance_groups.{index}.instance_type", problem, group.instance_type
            )
    rows = machines(job)
    # In reverse, so that the first type of each kind is the one that is named.
    kinds = {_kind(row): row.name for row in reversed(rows)}
    if len(kinds) > 1:
        problem = "all groups must have the same kind of accelerator, for the nodes run one image"
        seen = ", ".join(f"{name} has {kind}" for kind, name in kinds.items())
        yield Issue("group-accelerators-differ", "backend.instance_groups", problem, seen, "Give groups of one kind")
    # The type decides processes, image and network settings, so it must be one that a node really has.
    if rows and job.compute.instance_type not in machine_types(job):
        problem = "has no effect: no instance group is of this type"
        remedy = f"Write {rows[0].name}, or another type of the groups"
        yield Issue("instance-type-not-in-groups", "compute.instance_type", problem, job.compute.instance_type, remedy)


def _kind(row: Instance) -> str:
    return "Neuron cores" if row.is_neuron else "GPUs" if row.is_gpu else "no accelerator"


def _strategy_issues(job: JobSpec, options: SageMakerOptions) -> Iterator[Issue]:
    parallelism = parallelism_of(job.task)
    if parallelism is None:
        return
    image, marker = options.image_uri, parallelism.image_marker
    # A built image has a name of the user's own, from which nothing follows.
    if image is not None and options.image == "stock" and marker is not None and marker not in image:
        problem = f"this image does not hold the library of strategy {parallelism.strategy}"
        remedy = f"Use an image of {marker} (leave image_uri out), or image: built for one made from it"
        yield Issue("image-without-library", "backend.image_uri", problem, image, remedy)


def _capacity_issues(options: SageMakerOptions) -> Iterator[Issue]:
    if options.spot and options.keep_alive_period_in_seconds is not None:
        problem, seen = "a warm pool cannot be of spot capacity", options.keep_alive_period_in_seconds
        yield Issue(
            "warm-pool-with-spot", "backend.keep_alive_period_in_seconds", problem, seen, "Leave one of the two out"
        )
    if options.spot and options.training_plan_arn is not None:
        problem = "a training plan is reserved capacity, not spot"
        yield Issue("training-plan-with-spot", "backend.spot", problem, True, "Leave one of the two out")
    for key in options.tags:
        if key.lower().startswith("aws:"):
            yield Issue("tag-prefix-of-aws", f"backend.tags.{key}", "tags that begin with aws: are AWS's own", key)


def _location_issues(job: JobSpec) -> Iterator[Issue]:
    """Places that a container in the cloud cannot see."""
    if not job.storage.startswith("s3://"):
        remedy = "Write s3://bucket/prefix; folders are for the local backend"
        yield Issue("storage-not-in-s3", "storage", "a SageMaker job keeps its run in S3", job.storage, remedy)
    locations = {**sources(job), **{f"inputs.{name}": it for name, it in job.inputs.items() if isinstance(it, str)}}
    for path, location in locations.items():
        if path == "task.source" or location.startswith("/opt/ml/") or is_reference(location):
            continue  # a program goes into the bundle
        if local_folder(location) is not None:
            remedy = "Copy it first: sm-llm sync PATH s3://bucket/prefix"
            yield Issue(
                "input-only-on-this-machine", path, "is on this machine, where the job cannot see it", location, remedy
            )
    for path, folder in output_folders(job).items():
        if not folder.is_relative_to("/opt/ml"):
            remedy = "Leave it out, or give an address that the job can reach"
            problem = "is on this machine, where the job cannot see it"
            yield Issue("output-only-on-this-machine", path, problem, str(folder), remedy)


def _secret_issues(job: JobSpec) -> Iterator[Issue]:
    for name, reference in job.secrets.items():
        if reference.startswith(_LOCAL_SECRETS):
            problem = "the container of a SageMaker job has no such place to read it from"
            yield Issue(
                "secret-source-unsupported", f"secrets.{name}", problem, reference, "Use secretsmanager: or ssm:"
            )


def job_warnings(job: JobSpec) -> Iterator[Issue]:
    """What works, but is probably not meant."""
    options, path = SageMakerOptions.of(job), "backend.instance_groups" if groups(job) else "compute.instance_type"
    yield from image_warnings(job)
    for kind in [it for it in machine_types(job) if instance(it) is None]:
        meant = nearest_instance(kind)
        message = (
            f"{kind} is not in our table{f' ({meant.name} is)' if meant else ''}: whether it "
            "exists, and whether it has EFA, is not known; set FI_PROVIDER=efa under environment if it has"
        )
        yield warning("instance-type-not-in-table", path, message)
    for row in machines(job):
        if row.accelerator and (idle := _idle(job, row)):
            yield warning("accelerators-idle", path, idle)
        if job.compute.instance_count > 1 and row.accelerator and not row.efa_cards:
            message = f"{row.name} has no EFA: the nodes talk over TCP at {row.network_gbps:g} Gb/s"
            yield warning("instance-type-without-efa", path, message)
        if options.volume_size_gb and row.nvme_gb:
            message = f"{row.name} uses its NVMe disks ({row.nvme_gb:,} GB) whatever is asked"
            yield warning("volume-size-without-effect", "backend.volume_size_gb", message)
    if options.spot:
        message = f"spot: interrupted at any time; the run continues from its newest checkpoint in {job.storage}"
        yield warning("spot-interruptions", "backend.spot", message)


def _idle(job: JobSpec, row: Instance) -> str:
    """Accelerators of a machine that are paid for and compute nothing, in words; empty where all compute."""
    devices = "Neuron cores" if row.is_neuron else "GPUs"
    if not starts_ranks(job.task):
        if starts_own_ranks(job.task):
            return ""
        what = f"{job.task.kind} computes on the CPU: the {row.accelerators} {devices} of {row.name} are paid for"
        return f"{what} and not used. Choose a type without them, for example ml.m5.4xlarge"
    used = job.compute.processes
    if used >= row.accelerators:
        return ""
    unless = " unless the program itself uses several" if isinstance(job.task, ScriptTask) else ""
    left = f"the other {row.accelerators - used} are paid for and not used{unless}"
    return (
        f"{row.name} has {row.accelerators} {devices}, and compute.processes_per_instance={used} uses {used}: {left}. "
        "Leave it out to use all"
    )
