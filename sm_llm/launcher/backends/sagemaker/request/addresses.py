"""Addresses that a job on SageMaker names: its image, its bucket, its wheels, its inputs' names, its own program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue, StorageError, warning
from sm_llm.launcher.backends.sagemaker.jobs.names import base_in_names
from sm_llm.launcher.backends.sagemaker.request.arns import ECR
from sm_llm.launcher.planning.plan_settings import requirements
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.spec.tasks import RegisterTask, ScriptTask
from sm_llm.storage.uri import is_s3, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.job import JobSpec


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
