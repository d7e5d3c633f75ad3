"""The whole CreateTrainingJob request of a job, as a value: the SDK takes no part in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.contract.stock import WHEELHOUSE
from sm_llm.launcher.backends.sagemaker.jobs.names import job_name, normalised
from sm_llm.launcher.backends.sagemaker.request.channels import channels
from sm_llm.launcher.backends.sagemaker.request.metrics import metric_definitions
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.machines.gpus import machines
from sm_llm.spec.tasks import TASK_KINDS

if TYPE_CHECKING:
    from sm_llm.launcher.backends.sagemaker.request.settings import Settings
    from sm_llm.launcher.backends.sagemaker.request.time_limit import TimeLimit
    from sm_llm.launcher.backends.sagemaker.target import SageMakerTarget
    from sm_llm.spec.job import JobSpec

RUN_TAG = "sm_llm:run"
"""Tag with the address of the run that a job is an attempt of."""
ATTEMPT_TAG = "sm_llm:attempt"
NAME_TAG = "sm_llm:name"
"""Tag with the name as it was given, before it was made fit for the service."""
_LOG_LEVEL = 20
_NVME_VOLUME_GB = 30
_EBS_VOLUME_GB = 100


@dataclass(frozen=True)
class RunPlace:
    """What only the launch of a run knows of its request."""

    run_id: str
    run_uri: str
    attempt: int
    code_uri: str
    """The bundle's archive in S3."""
    job_folder: str
    """The folder in S3 that holds job.json."""


def training_job(job: JobSpec, target: SageMakerTarget, given: RunPlace) -> dict[str, Any]:
    """The request. Equal inputs give equal requests; nothing is decided here."""
    options, settings = SageMakerOptions.of(job), target.settings
    name = job_name(given.run_id, given.attempt, options.base_job_name)
    request: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": _algorithm(options, target),
        "InputDataConfig": channels(job, given.job_folder),
        "OutputDataConfig": _output(given, settings),
        "ResourceConfig": _resources(job, options, settings),
        "StoppingCondition": _stopping(target.limit),
        "HyperParameters": _hyperparameters(job, target, given, name),
        "Tags": _tags(job, options, settings, given),
        "ProfilerConfig": {"DisableProfiler": True},
    }
    variables = _environment(job, options, target)
    return request | ({"Environment": variables} if variables else {}) | _switches(options, settings)


def _environment(job: JobSpec, options: SageMakerOptions, target: SageMakerTarget) -> dict[str, str]:
    """Variables of the container: defaults of the SDK, then those of the instance type, then the job's own."""
    wheels = {WHEELHOUSE: options.wheelhouse} if options.wheelhouse else {}
    return {**target.settings.environment, **target.distribution.environment, **wheels, **job.environment}


def _algorithm(options: SageMakerOptions, target: SageMakerTarget) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"TrainingImage": target.image_uri, "TrainingInputMode": "File"}
    if options.metric_definitions:
        algorithm["MetricDefinitions"] = metric_definitions()
        algorithm["EnableSageMakerMetricsTimeSeries"] = True  # as the SDK's PyTorch sends since PyTorch 1.3
    return algorithm


def _output(given: RunPlace, settings: Settings) -> dict[str, str]:
    """Where SageMaker puts what is left in its own folders; nothing large is: the worker publishes by itself."""
    output = {"S3OutputPath": f"{given.run_uri}/sagemaker", "CompressionType": "NONE"}
    key = settings.output_kms_key_id
    return output | ({"KmsKeyId": key} if key else {})


def _resources(job: JobSpec, options: SageMakerOptions, settings: Settings) -> dict[str, Any]:
    compute = job.compute
    resources: dict[str, Any] = {"VolumeSizeInGB": volume_size_gb(job)}
    if options.instance_groups:
        resources["InstanceGroups"] = [
            {"InstanceGroupName": it.name, "InstanceType": it.instance_type, "InstanceCount": it.instance_count}
            for it in options.instance_groups
        ]
    else:
        resources |= {"InstanceType": compute.instance_type, "InstanceCount": compute.instance_count}
    optional = {
        "VolumeKmsKeyId": settings.volume_kms_key_id,
        "KeepAlivePeriodInSeconds": options.keep_alive_period_in_seconds,
        "TrainingPlanArn": options.training_plan_arn,
    }
    return resources | {name: value for name, value in optional.items() if value is not None}


def volume_size_gb(job: JobSpec) -> int:
    """Size of the storage volume; types with NVMe disks use those, whatever is asked for."""
    options = SageMakerOptions.of(job)
    rows = machines(job)
    has_disks = bool(rows) and all(row.nvme_gb for row in rows)
    return options.volume_size_gb or (_NVME_VOLUME_GB if has_disks else _EBS_VOLUME_GB)


def _stopping(limit: TimeLimit) -> dict[str, int]:
    stopping = {"MaxRuntimeInSeconds": limit.max_run}
    return stopping | ({"MaxWaitTimeInSeconds": limit.max_wait} if limit.max_wait is not None else {})


def _hyperparameters(job: JobSpec, target: SageMakerTarget, given: RunPlace, name: str) -> dict[str, str]:
    """What the training toolkit reads, each as JSON; the job itself is in job.json, whatever its size."""
    values = {
        "sagemaker_submit_directory": given.code_uri,
        "sagemaker_program": TASK_KINDS[job.task.kind].entrypoint,
        "sagemaker_container_log_level": _LOG_LEVEL,
        "sagemaker_job_name": name,
        "sagemaker_region": target.settings.region,
        **_launch_parameters(job, target),
    }
    return {key: json.dumps(value) for key, value in values.items()}


def _launch_parameters(job: JobSpec, target: SageMakerTarget) -> dict[str, Any]:
    parameters = target.distribution.hyperparameters
    if SageMakerOptions.of(job).instance_groups:
        parameters = {key: value for key, value in parameters.items() if key != "sagemaker_instance_type"}
    return parameters


def _tags(job: JobSpec, options: SageMakerOptions, settings: Settings, given: RunPlace) -> list[dict[str, str]]:
    """The user's tags, then ours: how a job is found again, and names as they were given."""
    ours = {RUN_TAG: given.run_uri, ATTEMPT_TAG: str(given.attempt)}
    base = options.base_job_name or job.name
    ours[NAME_TAG] = base if normalised(base) != base else job.name
    return [{"Key": key, "Value": value} for key, value in {**settings.tags, **ours}.items()]


def _switches(options: SageMakerOptions, settings: Settings) -> dict[str, Any]:
    """Parts of the request that are there only when they are wanted."""
    switches: dict[str, Any] = {}
    if settings.subnets:
        switches["VpcConfig"] = {
            "Subnets": list(settings.subnets),
            "SecurityGroupIds": list(settings.security_group_ids),
        }
    if settings.encrypt_inter_container_traffic:
        switches["EnableInterContainerTrafficEncryption"] = True
    if options.spot:
        switches["EnableManagedSpotTraining"] = True
    if options.max_retry_attempts is not None:
        switches["RetryStrategy"] = {"MaximumRetryAttempts": options.max_retry_attempts}
    if options.remote_debug:
        switches["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    return switches
