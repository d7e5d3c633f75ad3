"""Issues of a request by the fields of the specification: where the user wrote the value, and what to write."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.launcher.backends.sagemaker.request.limits import limit_issues
from sm_llm.launcher.backends.sagemaker.request.request import NAME_TAG, RUN_TAG

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.errors import Issue

_FIELDS = {
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
    "VpcConfig.Subnets": "backend.vpc.subnets",
    "VpcConfig.SecurityGroupIds": "backend.vpc.security_group_ids",
    "RetryStrategy.MaximumRetryAttempts": "backend.max_retry_attempts",
    "StoppingCondition.MaxRuntimeInSeconds": "backend.max_run_seconds",
    "StoppingCondition.MaxWaitTimeInSeconds": "backend.max_wait_seconds",
    "Environment": "environment",
    "Tags": "backend.tags",
}
"""Path in the request -> field of the specification."""

_NAMED = {"InputDataConfig": "ChannelName", "Tags": "Key"}
"""Lists of the request that are mappings in the specification, and what names an entry."""

_OWN = {
    ("InputDataConfig", JOB_CHANNEL): "storage",
    ("Tags", RUN_TAG): "storage",
    ("Tags", NAME_TAG): "backend.base_job_name",
}
"""Entries of our own, and the fields that they follow from."""

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
    prefix = next((it for it in _FIELDS if issue.path == it or issue.path.startswith(f"{it}.")), None)
    if prefix is None:
        return issue
    field = _FIELDS[prefix]
    rest = issue.path[len(prefix) :]
    if rest and prefix in _NAMED:
        entry = request[prefix][int(rest.split(".")[1])][_NAMED[prefix]]
        if own := _OWN.get((prefix, entry)):
            return replace(issue, path=own)
        rest = f".{entry}"
    return replace(issue, path=f"{field}{rest}", remedy=issue.remedy or _REMEDIES.get(field, ""))
