"""Partition, region and account of every ARN and image that a job names, compared with the job's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.sagemaker.request.limits import fresh_session
from sm_llm.launcher.images.images import DLC_ACCOUNTS, SMP_ACCOUNT, dns_suffix
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.tasks import RegisterTask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backends.sagemaker.request.settings import Settings
    from sm_llm.spec.job import JobSpec

_ARN = re.compile(
    r"arn:(?P<partition>[a-z][a-z-]*):(?P<service>[a-z0-9-]+):(?P<region>[a-z0-9-]*):(?P<account>\d{12})?:(?P<rest>.+)"
)
ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<suffix>[a-z0-9.-]+)"
    r"/[a-z0-9][a-z0-9._/-]*(?::[\w.-]{1,128})?(?:@sha256:[0-9a-f]{64})?"
)
"""The address of an image in a private registry of ECR."""


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
        return str(fresh_session().get_partition_for_region(region))
    except UnknownRegionError as error:
        raise ValueError(str(error)) from None


def place_issues(job: JobSpec, found: Settings) -> Iterator[Issue]:
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
        if image is not None and (match := ECR.fullmatch(image)):
            yield from _image_issues(path, image, match, found.region)


def place_warnings(job: JobSpec, found: Settings) -> Iterator[Issue]:
    """What may work, if another account or region allows it."""
    account = _account(found)
    for it in _named(job, found):
        match = _ARN.fullmatch(it.value or "")
        if match and match["account"] and account not in (None, match["account"]):
            message = f"is of account {match['account']}, the job runs in {account}: its policy must allow that"
            yield warning("arn-of-another-account", it.path, message)
    for path, image in _images(job):
        match = ECR.fullmatch(image or "")
        if match and account is not None and match["account"] not in (account, SMP_ACCOUNT, *DLC_ACCOUNTS.values()):
            message = (
                f"the repository is of account {match['account']}, the job runs in {account}: its policy must "
                "let that account pull"
            )
            yield warning("image-of-another-account", path, message)
    region = job.storage_options.region
    if region is not None and found.region is not None and region != found.region:
        message = f"the bucket is in {region}, the job runs in {found.region}: traffic is billed"
        yield warning("storage-in-another-region", "storage_options.region", message)


def _account(found: Settings) -> str | None:
    match = _ARN.fullmatch(found.role or "")
    return match["account"] if match else None


def _named(job: JobSpec, found: Settings) -> Iterator[_Named]:
    options = SageMakerOptions.of(job)
    yield _Named("backend.role", found.role, "iam", in_region=False, is_arn=True)
    yield _Named("backend.output_kms_key_id", found.output_kms_key_id, "kms")
    yield _Named("backend.volume_kms_key_id", found.volume_kms_key_id, "kms")
    yield _Named("storage_options.kms_key_id", job.storage_options.kms_key_id, "kms", in_region=False)
    yield _Named("backend.training_plan_arn", options.training_plan_arn, "sagemaker", in_account=True, is_arn=True)
    if isinstance(job.task, RegisterTask):
        yield _Named("task.group", job.task.group, "sagemaker")
    for name, reference in job.secrets.items():
        kind, _, place = reference.partition(":")
        if kind in ("secretsmanager", "ssm"):
            yield _Named(f"secrets.{name}", place, kind, in_region=False)


def _arn_issues(it: _Named, region: str, partition: str, account: str | None) -> Iterator[Issue]:
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
    elif match["account"] in DLC_ACCOUNTS.values() and match["account"] != published:
        where = f"there they are of account {published}" if published else "none are known to be published there"
        problem = f"account {match['account']} publishes no AWS images in {region}; {where}"
        yield Issue(
            "image-account-unknown", path, problem, image, "Leave image_uri out: the table of images knows the account"
        )
