"""Rules that neither the SDK nor botocore checks: what belongs together in a training job, found before any upload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.sagemaker.request.addresses import address_issues
from sm_llm.launcher.backends.sagemaker.request.image_names import image_issues, image_warnings
from sm_llm.launcher.backends.sagemaker.request.time_limit import LONGEST_SECONDS
from sm_llm.launcher.planning.local_places import is_reference, local_folder
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.inputs import FileSystemInput
from sm_llm.spec.loading.references import sources
from sm_llm.spec.machines.gpus import groups, machine_types, machines
from sm_llm.spec.machines.hardware import instance, nearest_instance
from sm_llm.spec.tasks import ScriptTask, parallelism_of, starts_ranks, training_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.launcher.backends.sagemaker.request.settings import Settings
    from sm_llm.launcher.backends.sagemaker.request.time_limit import TimeLimit
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.backends.base import InstanceGroup
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.machines.hardware import Instance

_LOCAL_SECRETS = ("env:", "file:", "k8s:")


def job_issues(job: JobSpec) -> Iterator[Issue]:
    """Issues of a job that runs on SageMaker, whatever account it runs in."""
    options = SageMakerOptions.of(job)
    yield from _instance_issues(job, options)
    yield from _strategy_issues(job, options)
    yield from _capacity_issues(options)
    yield from _place_issues(job)
    yield from address_issues(job)
    yield from image_issues(job)
    yield from _secret_issues(job)
    if options.image == "built" and options.image_uri is None:
        remedy = "Build and push it with sm-llm image build, sm-llm image push, and give its address"
        yield Issue(
            "built-image-address-missing",
            "backend.image_uri",
            "image: built needs the address of that image",
            None,
            remedy,
        )


def account_issues(job: JobSpec, found: Settings, limit: TimeLimit | None) -> Iterator[Issue]:
    """Issues that hang on the account's settings and on how long the job may run."""
    row = next((row for row in machines(job) if row.nvme_gb), None)
    file_systems = [name for name, it in job.inputs.items() if isinstance(it, FileSystemInput)]
    for name in file_systems if not found.subnets else []:
        remedy = "Set backend.vpc.subnets and backend.vpc.security_group_ids to the file system's"
        yield Issue(
            "file-system-without-vpc",
            f"inputs.{name}",
            "a file system can be mounted only inside its network",
            None,
            remedy,
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


def model_issues(plan: Plan) -> Iterator[Issue]:
    """Issues of the planned model on the job's instance types."""
    parallelism = parallelism_of(plan.job.task)
    if parallelism is None or plan.model is None:
        return
    for row in machines(plan.job):
        yield from parallelism.head_issues(row, plan.model.key_value_heads)


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
            problem = f"{processes} processes for the {row.accelerators} accelerators of {row.name}"
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
        problem = f"the groups have {total} nodes together, compute.instance_count is {job.compute.instance_count}"
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
            problem = f"runs {row.processes} processes a node, the others {job.compute.processes}"
            yield Issue(
                "group-processes-differ", f"backend.instance_groups.{index}.instance_type", problem, group.instance_type
            )
    rows = machines(job)
    kinds = {_kind(row): row.name for row in reversed(rows)}
    if len(kinds) > 1:
        problem = "all groups must have the same kind of accelerator, for the nodes run one image"
        seen = ", ".join(f"{name} has {kind}" for kind, name in kinds.items())
        yield Issue("group-accelerators-differ", "backend.instance_groups", problem, seen, "Give groups of one kind")
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
    path = "backend.instance_groups" if groups(job) else "compute.instance_type"
    for row in machines(job):
        yield from parallelism.instance_issues(row, path)
        training = training_of(job.task)
        if training is not None and training.precision.compute == "fp8" and not (row.has_fp8 or row.is_neuron):
            problem = f"the {row.accelerator or 'CPU'} of {row.name} has no fp8"
            yield Issue("compute-format-unsupported-by-gpu", "task.precision.compute", problem, "fp8", "Use bf16")
    image, marker = options.image_uri, parallelism.image_marker
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


def _place_issues(job: JobSpec) -> Iterator[Issue]:
    """Places that a container in the cloud cannot see."""
    if not job.storage.startswith("s3://"):
        remedy = "Write s3://bucket/prefix; folders are for the local backend"
        yield Issue("storage-not-in-s3", "storage", "a SageMaker job keeps its run in S3", job.storage, remedy)
    places = {**sources(job), **{f"inputs.{name}": it for name, it in job.inputs.items() if isinstance(it, str)}}
    for path, place in places.items():
        if path == "task.source" or place.startswith("/opt/ml/") or is_reference(place):
            continue  # a program goes into the bundle
        if local_folder(place) is not None:
            remedy = "Copy it first: sm-llm sync PATH s3://bucket/prefix"
            yield Issue(
                "input-only-on-this-machine", path, "is on this machine, where the job cannot see it", place, remedy
            )
    training = training_of(job.task)
    tensorboard = training.logging.sinks.tensorboard if training else None
    if tensorboard and tensorboard.folder and local_folder(tensorboard.folder) is not None:
        remedy = "Leave it out: it is kept in the run's folder in S3"
        path = "task.logging.sinks.tensorboard.folder"
        yield Issue(
            "tensorboard-only-on-this-machine",
            path,
            "is on this machine, where the job cannot see it",
            tensorboard.folder,
            remedy,
        )


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
    training = training_of(job.task)
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
        if training and training.precision.compute == "bf16" and not row.has_bf16:
            message = f"{row.accelerator} has no bf16 and emulates it slowly; use fp32"
            yield warning("bf16-emulated", "task.precision.compute", message)
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
        if isinstance(job.task, ScriptTask):
            return ""  # a shell script starts its own processes
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
