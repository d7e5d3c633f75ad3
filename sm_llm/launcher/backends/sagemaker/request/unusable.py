"""Settings that the service accepts and with which no job can work: variables, tags, networks and access to storage."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.sagemaker.request.arns import partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backends.sagemaker.request.settings import Settings
    from sm_llm.spec.job import JobSpec

_NO_FILE = "names a profile of files that the container does not have"
_REFUSED_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": ("would hide GPUs from the processes of a node", "Set compute.processes_per_instance"),
    "NVIDIA_VISIBLE_DEVICES": ("would hide GPUs from the container", "Set compute.processes_per_instance"),
    "AWS_PROFILE": (_NO_FILE, "Leave it out: the job has the credentials of backend.role"),
    "AWS_DEFAULT_PROFILE": (_NO_FILE, "Leave it out: the job has the credentials of backend.role"),
}
_WARNED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME", "HOME")
_OWN_TAGS = "sm_llm:"
_DIGITS = re.compile(r"[0-9a-f]+")
"""Of an id of EC2, behind the hyphen."""


def unusable_issues(job: JobSpec, found: Settings) -> list[Issue]:
    """Issues of a job for SageMaker, not for its emulation on this machine."""
    return [*_variables(job, found), *_tags(found), *_network(found), *_storage(job, found)]


def unusable_warnings(job: JobSpec, found: Settings) -> Iterator[Issue]:
    """Variables in whose place the image has its own, and a store that only this machine reaches.

    It is not refused, since stand-ins of the service run their jobs on this machine.
    """
    endpoint = job.storage_options.endpoint_url
    if endpoint is not None and _is_loopback(endpoint):
        why = "is this machine alone: in the job it would be the container itself"
        remedy = "Name an address that the job's network reaches, or run here: backend.name=local"
        yield warning("endpoint-of-this-machine", "storage_options.endpoint_url", f"{endpoint} {why}", remedy=remedy)
    for name in {**found.environment, **job.environment}:
        if name in _WARNED_VARIABLES:
            message = "takes the place of the image's own, which its programs may need"
            yield warning("environment-variable-of-the-image", f"environment.{name}", message)


def _variables(job: JobSpec, found: Settings) -> Iterator[Issue]:
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


def _tags(found: Settings) -> Iterator[Issue]:
    for name, value in found.tags.items():
        if name.lower().startswith(_OWN_TAGS):
            problem = f"begins with {_OWN_TAGS}, as the tags by which a run is found again"
            yield Issue("tag-prefix-reserved", f"backend.tags.{name}", problem, value, "Rename it")


def _network(found: Settings) -> Iterator[Issue]:
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


def _storage(job: JobSpec, found: Settings) -> Iterator[Issue]:
    options = job.storage_options
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
        return host.rstrip(".").lower() == "localhost" or host.lower().endswith(".localhost")
