"""Addresses that a job on SageMaker names: roles and keys, images, its bucket, its wheels, its inputs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from sm_llm.aws import fresh_session, need_aws
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue, StorageError, warning
from sm_llm.launcher.backends.sagemaker.request.request import base_in_names
from sm_llm.launcher.images.images import DLC_ACCOUNTS, MINIMUM_PYTHON, MINIMUM_TORCH, SMP_ACCOUNT, dns_suffix, stack_of
from sm_llm.launcher.planning.plan import requirements
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.inputs import input_location
from sm_llm.spec.job_machines import machines
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.spec.references import sources
from sm_llm.spec.tasks import PrecompileTask, RegisterTask, ScriptTask, TrainTask
from sm_llm.storage.uri import is_s3, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings
    from sm_llm.spec.job import JobSpec


_ARN = re.compile(
    r"arn:(?P<partition>[a-z][a-z-]*):(?P<service>[a-z0-9-]+):(?P<region>[a-z0-9-]*):(?P<account>\d{12})?:(?P<rest>.+)"
)
ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)"
    r"/[a-z0-9][a-z0-9._/-]*(?::[\w.-]{1,128})?(?:@sha256:[0-9a-f]{64})?"
)
"""The address of an image in a private registry of ECR."""
DEFAULT_BUCKET = re.compile(r"sagemaker-(?P<region>[a-z]{2,}(?:-[a-z]+)+-\d+)-(?P<account>\d{12})")
"""Buckets that the SDK makes: the name has region and account."""


@dataclass(frozen=True)
class _Named:
    """One value of a job that may be an ARN."""

    path: str
    value: str | None
    service: str
    in_region: bool = True
    """Whether it must be in the job's region; a role is in none, and a secret is read where it lies."""
    in_account: bool = False
    """Whether it must be in the job's account; else another account may share it."""
    is_arn: bool = False
    """Whether nothing but an ARN is accepted."""


@lru_cache
def partition_of(region: str) -> str:
    """A region's partition. Raises ``ValueError`` for what is not a region."""
    from botocore.exceptions import UnknownRegionError

    try:
        need_aws()
        return str(fresh_session().get_partition_for_region(region))
    except UnknownRegionError as error:
        raise ValueError(str(error)) from None


def location_issues(job: JobSpec, found: JobSettings) -> Iterator[Issue]:
    """ARNs and images that belong to another partition, region or account than the job."""
    if found.region is None:
        return
    try:
        partition = partition_of(found.region)
    except ValueError:
        remedy = "Write a region such as us-west-2"
        yield Issue("region-unknown", "backend.region", "is not a region of AWS", found.region, remedy)
        return
    account = _account(found)
    for it in _named(job, found):
        yield from _arn_issues(it, found.region, partition, account)
    for path, image in _images(job):
        # An address of another form is refused by address_issues.
        if image is not None and (match := ECR.fullmatch(image)):
            yield from _image_issues(path, image, match, found.region)


def location_warnings(job: JobSpec, found: JobSettings) -> Iterator[Issue]:
    """What may work, if another account or region allows it."""
    account = _account(found)
    for it in _named(job, found):
        match = _ARN.fullmatch(it.value or "")
        if match and match["account"] and account not in (None, match["account"]):
            message = f"is of account {match['account']}, the job runs in {account}: its policy must allow that"
            yield warning("arn-of-another-account", it.path, message)
    for path, image in _images(job):
        match = ECR.fullmatch(image or "")
        # Every account may pull from the registries of AWS.
        if match and account is not None and match["account"] not in (account, SMP_ACCOUNT, *DLC_ACCOUNTS.values()):
            message = (
                f"the repository is of account {match['account']}, the job runs in {account}: its policy must "
                "let that account pull"
            )
            yield warning("image-of-another-account", path, message)
    yield from _bucket_warnings(job, found.region, account)
    region = job.storage_options.region
    if region is not None and found.region is not None and region != found.region:
        message = f"the bucket is in {region}, the job runs in {found.region}: traffic is billed"
        yield warning("storage-in-another-region", "storage_options.region", message)


def _bucket_warnings(job: JobSpec, region: str | None, account: str | None) -> Iterator[Issue]:
    """Buckets that the SDK made for another region or account, as their names show."""
    options = SageMakerOptions.of(job)
    own = {"storage": job.storage, "backend.bucket": options.bucket, "backend.wheelhouse": options.wheelhouse}
    named = {f"inputs.{name}": input_location(value) for name, value in job.inputs.items()}
    for path, location in {**own, **named, **sources(job)}.items():
        match = DEFAULT_BUCKET.fullmatch((location or "").removeprefix("s3://").partition("/")[0])
        if match and region is not None and match["region"] != region:
            message = f"the bucket is in {match['region']}, the job runs in {region}: traffic is billed"
            yield warning("bucket-in-another-region", path, message)
        if match and account is not None and match["account"] != account:
            message = f"the bucket is of account {match['account']}, the job runs in {account}: policies must allow it"
            yield warning("bucket-of-another-account", path, message)


def _account(found: JobSettings) -> str | None:
    # A job runs in the account of its role.
    match = _ARN.fullmatch(found.role or "")
    return match["account"] if match else None


def _named(job: JobSpec, found: JobSettings) -> Iterator[_Named]:
    options = SageMakerOptions.of(job)
    yield _Named("backend.role", found.role, "iam", in_region=False, is_arn=True)
    yield _Named("backend.output_kms_key_id", found.output_kms_key_id, "kms")
    yield _Named("backend.volume_kms_key_id", found.volume_kms_key_id, "kms")
    yield _Named("storage_options.kms_key_id", job.storage_options.kms_key_id, "kms", in_region=False)
    yield _Named("backend.training_plan_arn", options.training_plan_arn, "sagemaker", in_account=True, is_arn=True)
    if isinstance(job.task, RegisterTask):
        yield _Named("task.group", job.task.group, "sagemaker")
    for name, reference in job.secrets.items():
        kind, _, location = reference.partition(":")
        if kind in ("secretsmanager", "ssm"):
            yield _Named(f"secrets.{name}", location, kind, in_region=False)


def _arn_issues(it: _Named, region: str, partition: str, account: str | None) -> Iterator[Issue]:
    # A key may be given by its id or alias, in which there is no region or account to compare.
    if it.value is None or not (it.is_arn or it.value.startswith("arn:")):
        return
    match = _ARN.fullmatch(it.value)
    if match is None or match["service"] != it.service:
        if not it.is_arn or match is not None:  # what is not an ARN at all is a broken limit of the service
            yield Issue(
                "arn-invalid",
                it.path,
                f"is not an ARN of {it.service}",
                it.value,
                f"Write arn:{partition}:{it.service}:…",
            )
    elif match["partition"] != partition:
        problem = f"is of partition {match['partition']}, the job runs in {region}, which is of {partition}"
        yield Issue(
            "arn-partition-mismatch",
            it.path,
            problem,
            it.value,
            "Name one of the job's own partition, or set backend.region",
        )
    elif it.in_region and match["region"] != region:
        problem = f"is in {match['region'] or 'no region'}, the job runs in {region}"
        yield Issue("arn-region-mismatch", it.path, problem, it.value, f"Name one in {region}, or set backend.region")
    elif it.in_account and account is not None and match["account"] != account:
        problem = f"is of account {match['account']}, the job runs in {account}, the account of its role"
        yield Issue("arn-account-mismatch", it.path, problem, it.value, "Name one of the job's own account")


def _images(job: JobSpec) -> Iterator[tuple[str, str | None]]:
    options = SageMakerOptions.of(job)
    yield "backend.image_uri", options.image_uri
    if isinstance(job.task, RegisterTask):
        yield "task.image_uri", job.task.image_uri


def _image_issues(path: str, image: str, match: re.Match[str], region: str) -> Iterator[Issue]:
    published, suffix = DLC_ACCOUNTS.get(region), dns_suffix(region)
    if match["region"] != region:
        problem = f"the image is in {match['region']}, the job runs in {region}; SageMaker pulls from its own region"
        yield Issue(
            "image-region-mismatch", path, problem, image, "Copy it there: sm-llm image push, or set backend.region"
        )
    elif match["suffix"] != suffix:
        yield Issue(
            "image-host-mismatch",
            path,
            f"hosts of {region} end with {suffix}",
            image,
            f"Write ….dkr.ecr.{region}.{suffix}/…",
        )
    # Another account is the user's own registry, which may hold an image in any region.
    elif match["account"] in DLC_ACCOUNTS.values() and match["account"] != published:
        where = f"there they are of account {published}" if published else "none are known to be published there"
        problem = f"account {match['account']} publishes no AWS images in {region}; {where}"
        yield Issue(
            "image-account-unknown", path, problem, image, "Leave image_uri out: the table of images knows the account"
        )


Hardware = Literal["gpu", "cpu", "neuron"]
_NAME = re.compile(r"[^/]+/(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?")
_VERSION = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)")
_PYTHON = re.compile(r"(?:^|-)py3(?P<minor>\d+)(?:-|$)")
_GPU = re.compile(r"(?:^|-)(?:gpu|cu\d+)(?:-|$)")
_CPU = re.compile(r"(?:^|-)cpu(?:-|$)")
_REMEDY = "Leave image_uri out: the table of images has one for every instance type"


@dataclass(frozen=True)
class AwsImage:
    """An image of the Deep Learning Containers or of SMP; what its name leaves out is None."""

    repository: str
    version: tuple[int, int] | None
    """Of the framework."""
    python: tuple[int, int] | None
    hardware: Hardware | None

    @property
    def has_torch(self) -> bool:
        return "pytorch" in self.repository or self.repository == "smdistributed-modelparallel"


def aws_image(uri: str) -> AwsImage | None:
    """What the address of an image holds; None where it is not one that AWS publishes for training or inference."""
    match, parts = ECR.fullmatch(uri), _NAME.match(uri)
    if match is None or parts is None or match["account"] not in (SMP_ACCOUNT, *DLC_ACCOUNTS.values()):
        return None
    repository, tag = parts["repository"], parts["tag"] or ""
    version, python = _VERSION.match(tag), _PYTHON.search(tag)
    hardware: Hardware | None = "gpu" if _GPU.search(tag) else "cpu" if _CPU.search(tag) else None
    return AwsImage(
        repository,
        (int(version["major"]), int(version["minor"])) if version else None,
        (3, int(python["minor"])) if python else None,
        # Images for Neuron name their hardware in the repository and not in the tag.
        "neuron" if "neuron" in uri else hardware,
    )


def image_issues(job: JobSpec) -> Iterator[Issue]:
    """Images of AWS in which a job cannot run, or not on its machines."""
    options = SageMakerOptions.of(job)
    if isinstance(job.task, RegisterTask):
        serving = aws_image(job.task.image_uri)
        if serving is not None and "training" in serving.repository:
            problem = "is an image for training, which serves no model"
            yield Issue(
                "inference-image-for-training-only",
                "task.image_uri",
                problem,
                job.task.image_uri,
                "Give an image for inference",
            )
    image = aws_image(options.image_uri or "")
    if image is None:
        return
    for problem, remedy in (*_content_problems(job, options, image), *_hardware_problems(job, image)):
        yield Issue("image-unfit-for-task", "backend.image_uri", problem, options.image_uri, remedy)


def image_warnings(job: JobSpec) -> Iterator[Issue]:
    """Images of AWS that work, but hold more than the machines can use."""
    options = SageMakerOptions.of(job)
    image, rows = aws_image(options.image_uri or ""), machines(job)
    if image is not None and image.version is None and "@" not in (options.image_uri or ""):
        message = (
            "the tag names no version, as those of AWS's images do, so what the image holds, and whether it exists, "
            "is not known"
        )
        yield warning("image-tag-without-version", "backend.image_uri", message, remedy=_REMEDY)
    if image is not None and image.hardware == "gpu" and rows and not any(row.accelerator for row in rows):
        message = (
            f"the image is for GPUs, {rows[0].name} has none: the job computes on the CPU and pulls gigabytes that it "
            "does not need"
        )
        yield warning("gpu-image-without-gpus", "backend.image_uri", message, remedy=_REMEDY)


def _content_problems(job: JobSpec, options: SageMakerOptions, image: AwsImage) -> Iterator[tuple[str, str]]:
    """(problem, remedy) of what is in the image."""
    trains = isinstance(job.task, TrainTask | PrecompileTask)
    oldest = MINIMUM_TORCH[stack_of(job)]
    # One problem is enough: a wrong image has another Python and another PyTorch, too.
    if "inference" in image.repository:
        yield "is an image for inference, without SageMaker's training toolkit", _REMEDY
    elif trains and not image.has_torch:
        yield f"holds no PyTorch, which {job.task.kind} needs", _REMEDY
    elif trains and image.version is not None and image.version < oldest:
        needed = ".".join(map(str, oldest))
        problem = f"holds PyTorch {'.'.join(map(str, image.version))}; {job.task.kind} needs {needed} or newer here"
        yield problem, _REMEDY
    elif image.python is not None and image.python < MINIMUM_PYTHON:
        own, needed = (".".join(map(str, it)) for it in (image.python, MINIMUM_PYTHON))
        yield f"holds Python {own}; the worker needs {needed} or newer", _REMEDY
    if options.image == "built":
        problem = "is AWS's own image, and image: built installs nothing of what it lacks"
        yield problem, "Set backend.image=stock, or give the address of an image made by sm-llm image build"


def _hardware_problems(job: JobSpec, image: AwsImage) -> Iterator[tuple[str, str]]:
    """(problem, remedy) of the image on the job's machines."""
    rows = machines(job)
    if not rows or image.hardware is None:
        return
    computes = isinstance(job.task, TrainTask | PrecompileTask | ScriptTask)
    # One type stands for all: groups of several kinds are refused.
    if image.hardware == "neuron" and not rows[0].is_neuron:
        yield f"is for Trainium, and {rows[0].name} is not", _REMEDY
    elif image.hardware != "neuron" and rows[0].is_neuron and computes:
        yield f"has no Neuron SDK, without which {rows[0].name} does not compute", _REMEDY
    elif image.hardware == "cpu" and rows[0].is_gpu and computes:
        yield f"is for CPUs: the GPUs of {rows[0].name} would be paid for and not used", _REMEDY


def address_issues(job: JobSpec) -> Iterator[Issue]:
    """Addresses that cannot be what they are taken for."""
    options = SageMakerOptions.of(job)
    if options.image_uri is not None and not ECR.fullmatch(options.image_uri):
        problem = _image_problem(options.image_uri)
        remedy = "Write ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG; sm-llm image push copies one there"
        yield Issue("image-address-invalid", "backend.image_uri", problem, options.image_uri, remedy)
    if isinstance(job.task, RegisterTask) and not ECR.fullmatch(job.task.image_uri):
        message = _image_problem(job.task.image_uri)
        remedy = "Write ACCOUNT.dkr.ecr.REGION.amazonaws.com/REPOSITORY:TAG"
        yield Issue("register-image-not-in-ecr", "task.image_uri", message, job.task.image_uri, remedy)
    # Parsed as an address, by the same rules as every other bucket.
    if options.bucket is not None and _bucket(f"s3://{options.bucket}") != options.bucket:
        named = _bucket(options.bucket)
        remedy = f"Write {named}" if named else "Write its name alone: lower-case letters, digits, dots and hyphens"
        yield Issue("backend-bucket-invalid", "backend.bucket", "is not a valid bucket name", options.bucket, remedy)
    if options.wheelhouse is not None and _bucket(options.wheelhouse) is None:
        remedy = "Write s3://bucket/prefix; sm-llm image wheelhouse fills it"
        yield Issue(
            "wheelhouse-address-invalid", "backend.wheelhouse", "is not a prefix in S3", options.wheelhouse, remedy
        )
    yield from channel_issues(job)
    if isinstance(job.task, ScriptTask):
        from sm_llm.launcher.planning.program_checks import source_issues

        yield from source_issues(job)


def _image_problem(uri: str) -> str:
    """Why an address is not that of an image in ECR: its registry, its repository, its tag or its digest."""
    registry, _, rest = uri.partition("/")
    # Each part is tried in an address whose other parts are right, to name the part that is wrong.
    if not ECR.fullmatch(f"{registry}/x"):
        return "SageMaker runs images of ECR only"
    name, at, digest = rest.partition("@")
    repository, _, tag = name.partition(":")
    if not ECR.fullmatch(f"{registry}/{repository}"):
        return f"the repository {repository!r} must be of lower-case letters, digits and . _ - /"
    if tag and not ECR.fullmatch(f"{registry}/x:{tag}"):
        return f"the tag {tag!r} must be of at most 128 letters, digits and . _ -"
    if at and not ECR.fullmatch(f"{registry}/x@{digest}"):
        return f"the digest {digest!r} must be sha256: and 64 digits of 0-9a-f"
    return "must be a registry, a repository, and a tag or a digest"


def channel_issues(job: JobSpec) -> Iterator[Issue]:
    """An input that another channel would take the place of."""
    if JOB_CHANNEL in job.inputs:
        problem = "is the name of the channel that brings the job itself"
        yield Issue("input-name-reserved", f"inputs.{JOB_CHANNEL}", problem, remedy="Give the input another name")


def _bucket(address: str) -> str | None:
    """The bucket of an address in S3; None for any other text."""
    try:
        return parse(address).bucket if is_s3(address) else None
    except StorageError:
        return None


def address_warnings(job: JobSpec) -> Iterator[Issue]:
    """Addresses that are possible, but hardly meant."""
    options = SageMakerOptions.of(job)
    base = options.base_job_name
    if base is not None and (shown := base_in_names(base)) != base:
        problem = "holds what no job's name may, or is too long"
        message = f"{to_typed(base)} {problem}: names of jobs begin with {shown}"
        yield warning("base-job-name-changed", "backend.base_job_name", message)
    if options.wheelhouse is not None and options.image == "built" and not requirements(job):
        message = f"{options.wheelhouse} has no effect: image=built has all that it needs"
        yield warning("wheelhouse-without-effect", "backend.wheelhouse", message)
    if options.image_uri is not None and options.image_version is not None:
        message = f"{options.image_version} has no effect beside image_uri"
        yield warning("image-version-without-effect", "backend.image_version", message)
