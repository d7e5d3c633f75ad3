"""What the service refuses of a request: the limits that botocore holds, under the names that the user gave."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sm_llm.aws import fresh_session, need_aws
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.request.request import NAME_TAG, RUN_TAG

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_JAVA = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{Alnum}": "A-Za-z0-9"}
"""Java's classes of characters as Python's; ``\\w`` is a little wider than letters, and the service decides."""


_NUMBERS = ("integer", "long", "float", "double")


def limit_issues(request: dict[str, Any], operation: str = "CreateTrainingJob") -> Iterator[Issue]:
    """Every limit that a request breaks, by its path in the request (``ResourceConfig.InstanceCount``)."""
    # botocore's own validator checks types, required members and minimums alone: maxima, patterns and choices, which
    # are in its model as well, are refused only by the service, after the uploads.
    yield from _walk(_input_shape(operation), request, "")


def value_issues(location: str, value: Any, path: str, operation: str = "CreateTrainingJob") -> Iterator[Issue]:
    """Types that a value at ``location`` of a request may not have, else limits that it breaks; ``path`` is its name.

    ``location`` is dotted, with ``*`` for an entry of a list.
    """
    from botocore.validate import ParamValidator

    shape = _input_shape(operation)
    # botocore's shapes: a list has one member, a structure has several by name.
    for name in location.split("."):
        shape = shape.member if name == "*" else shape.members.get(name)
        if shape is None:
            yield Issue(
                "request-value-unknown",
                path,
                "the installed botocore does not know this",
                value,
                "Install a newer boto3",
            )
            return
    found = ParamValidator().validate(value, shape).generate_report().splitlines()
    # What is out of range alone is reported below, in words of the service's limits.
    if not all("valid min" in it for it in found):
        yield Issue("request-value-not-sendable", path, f"cannot be sent: {'; '.join(found)}", value)
    else:
        yield from _walk(shape, value, path)


def known_values(shape: str) -> tuple[str, ...]:
    """What an enumeration of the service holds, e.g. ``TrainingInstanceType``."""
    return tuple(_model().shape_for(shape).enum)


@lru_cache
def _model() -> Any:
    need_aws()
    return fresh_session().get_service_model("sagemaker")


def _input_shape(operation: str) -> Any:
    return _model().operation_model(operation).input_shape


def _walk(shape: Any, value: Any, path: str) -> Iterator[Issue]:
    if shape.type_name == "structure":
        yield from _structure(shape, value, path)
    elif shape.type_name == "list":
        yield from _size(shape, len(value), path, "entries", len(value))
        for index, item in enumerate(value):
            yield from _walk(shape.member, item, f"{path}.{index}")
    elif shape.type_name == "map":
        yield from _size(shape, len(value), path, "entries", len(value))
        for key, item in value.items():
            yield from _text(shape.key, key, f"{path}.{key}", "name ")
            yield from _walk(shape.value, item, f"{path}.{key}")
    elif shape.type_name == "string":
        yield from _text(shape, value, path)
    # A bool is an int in Python, for botocore as well, but not a number for the service.
    elif shape.type_name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        yield Issue("request-number-expected", path, "must be a number", value)
    elif shape.type_name == "boolean" and not isinstance(value, bool):
        yield Issue("request-flag-expected", path, "must be true or false", value)
    elif shape.type_name in ("integer", "long"):
        yield from _size(shape, value, path, "", value)


def _structure(shape: Any, value: dict[str, Any], path: str) -> Iterator[Issue]:
    for name in shape.required_members:
        if name not in value:
            yield Issue("request-field-missing", _join(path, name), "missing")
    for name, item in value.items():
        member = shape.members.get(name)
        if member is None:
            yield Issue(
                "request-field-unknown",
                _join(path, name),
                "the installed botocore does not know this",
                remedy="Install a newer boto3",
            )
        else:
            yield from _walk(member, item, _join(path, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _size(shape: Any, size: float, path: str, unit: str, seen: Any) -> Iterator[Issue]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    counted = f"has {size:g} {unit}; " if unit else ""
    if most is not None and size > most:
        yield Issue("request-value-too-large", path, f"{counted}the service takes at most {most:,}", seen)
    elif least is not None and size < least:
        yield Issue("request-value-too-small", path, f"{counted}the service takes at least {least:,}", seen)


def _text(shape: Any, text: Any, path: str, what: str = "") -> Iterator[Issue]:
    if not isinstance(text, str):
        yield Issue("request-text-expected", path, "must be text", text)
        return
    pattern = shape.metadata.get("pattern")
    # The form first: a limit of the length is reported only for text of the right form.
    if pattern and not _matches(pattern, text):
        yield Issue("request-text-form", path, f"{what}does not have the form {pattern}", text)
    else:
        yield from _size(shape, len(text), path, f"characters{' in its name' if what else ''}", text)
    allowed = getattr(shape, "enum", ())
    # A type that is newer than the installed botocore is warned of and not refused (plan_checks).
    if allowed and shape.name != "TrainingInstanceType" and text not in allowed:
        yield Issue("request-text-not-a-choice", path, f"is none of {', '.join(allowed)}", text)


def _matches(pattern: str, text: str) -> bool:
    """Whether the whole text has the form. ``.`` takes line breaks: whether the service does is not documented."""
    return re.fullmatch(_python_pattern(pattern), text, re.DOTALL) is not None


def _python_pattern(pattern: str) -> str:
    # Replaced as text: no pattern of the operations that are checked escapes a class in another way.
    for java, python in _JAVA.items():
        pattern = pattern.replace(java, python)
    return pattern


FIELDS = {
    "TrainingJobName": "name",
    "RoleArn": "backend.role",
    "AlgorithmSpecification.TrainingImage": "backend.image_uri",
    "AlgorithmSpecification.MetricDefinitions": "backend.metric_definitions",
    "InputDataConfig": "inputs",
    "OutputDataConfig.KmsKeyId": "backend.output_kms_key_id",
    "OutputDataConfig.S3OutputPath": "storage",
    "ResourceConfig.VolumeKmsKeyId": "backend.volume_kms_key_id",
    "ResourceConfig.KeepAlivePeriodInSeconds": "backend.keep_alive_period_in_seconds",
    "ResourceConfig.TrainingPlanArn": "backend.training_plan_arn",
    "ResourceConfig.InstanceGroups": "backend.instance_groups",
    "ResourceConfig.InstanceType": "compute.instance_type",
    "ResourceConfig.VolumeSizeInGB": "backend.volume_size_gb",
    "ResourceConfig.InstanceCount": "compute.instance_count",
    "EnableManagedSpotTraining": "backend.spot",
    "EnableInterContainerTrafficEncryption": "backend.encrypt_inter_container_traffic",
    "RemoteDebugConfig.EnableRemoteDebug": "backend.remote_debug",
    "VpcConfig.Subnets": "backend.vpc.subnets",
    "VpcConfig.SecurityGroupIds": "backend.vpc.security_group_ids",
    "RetryStrategy.MaximumRetryAttempts": "backend.max_retry_attempts",
    "StoppingCondition.MaxRuntimeInSeconds": "backend.max_run_seconds",
    "StoppingCondition.MaxWaitTimeInSeconds": "backend.max_wait_seconds",
    "Environment": "environment",
    "Tags": "backend.tags",
}
"""Path in the request -> field of the specification."""

# Lists of the request that are mappings in the specification, and what names an entry.
_NAMED = {"InputDataConfig": "ChannelName", "Tags": "Key"}

# Entries of our own, and the fields that they follow from.
_OWN = {
    ("InputDataConfig", JOB_CHANNEL): "storage",
    ("Tags", RUN_TAG): "storage",
    ("Tags", NAME_TAG): "backend.base_job_name",
}

_REMEDIES = {
    "backend.role": "Give the whole ARN: arn:aws:iam::ACCOUNT:role/NAME",
    "backend.training_plan_arn": "Give the whole ARN: arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
    "backend.tags": "Write letters, digits, spaces and _.:/=+-@; there are at most 50 tags, our own 3 included",
    "inputs": "A name has letters, digits, dots, hyphens and underscores; there are at most 20, our own included",
    "environment": "Keep long or many values in a file that the job reads",
}


def request_issues(request: dict[str, Any]) -> Iterator[Issue]:
    """Limits of the service that a request breaks."""
    return (_named(issue, request) for issue in limit_issues(request))


def _named(issue: Issue, request: Mapping[str, Any]) -> Issue:
    """An issue under the name that the user gave the value by."""
    prefix = next((it for it in FIELDS if issue.path == it or issue.path.startswith(f"{it}.")), None)
    if prefix is None:
        return issue
    field = FIELDS[prefix]
    rest = issue.path[len(prefix) :]
    if rest and prefix in _NAMED:
        # The path has the position in the list, and the user wrote a name.
        entry = request[prefix][int(rest.split(".")[1])][_NAMED[prefix]]
        if own := _OWN.get((prefix, entry)):
            return replace(issue, path=own)
        rest = f".{entry}"
    return replace(issue, path=f"{field}{rest}", remedy=issue.remedy or _REMEDIES.get(field, ""))
