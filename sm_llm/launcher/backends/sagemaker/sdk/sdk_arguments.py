"""A CreateTrainingJob request in the words of the SageMaker SDK's estimators."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROCESSES = "sagemaker_mpi_num_of_processes_per_host"


def arguments(request: Mapping[str, Any]) -> dict[str, Any]:
    """The estimator's arguments that make it send ``request``."""
    algorithm, output, stopping = (
        request["AlgorithmSpecification"],
        request["OutputDataConfig"],
        request["StoppingCondition"],
    )
    hyperparameters = {key: json.loads(text) for key, text in request["HyperParameters"].items()}
    vpc = request.get("VpcConfig", {})
    return {
        "entry_point": hyperparameters["sagemaker_program"],
        "source_dir": hyperparameters["sagemaker_submit_directory"],
        "container_log_level": hyperparameters["sagemaker_container_log_level"],
        "image_uri": algorithm["TrainingImage"],
        "metric_definitions": algorithm.get("MetricDefinitions"),
        "enable_sagemaker_metrics": algorithm.get("EnableSageMakerMetricsTimeSeries"),
        "role": request["RoleArn"],
        "output_path": output["S3OutputPath"],
        "output_kms_key": output.get("KmsKeyId"),
        "disable_output_compression": True,
        "max_run": stopping["MaxRuntimeInSeconds"],
        "max_wait": stopping.get("MaxWaitTimeInSeconds"),
        "use_spot_instances": request.get("EnableManagedSpotTraining", False),
        "environment": request.get("Environment"),
        "tags": request["Tags"],
        "subnets": vpc.get("Subnets"),
        "security_group_ids": vpc.get("SecurityGroupIds"),
        "encrypt_inter_container_traffic": request.get("EnableInterContainerTrafficEncryption", False),
        "max_retry_attempts": request.get("RetryStrategy", {}).get("MaximumRetryAttempts"),
        "enable_remote_debug": request.get("RemoteDebugConfig", {}).get("EnableRemoteDebug"),
        # Without these two the SDK adds a profiler and a debugger hook of its own.
        "disable_profiler": True,
        "debugger_hook_config": False,
        **_resources(request),
        **_launch(hyperparameters, request),
    }


def _resources(request: Mapping[str, Any]) -> dict[str, Any]:
    resources = request["ResourceConfig"]
    common = {
        "volume_size": resources["VolumeSizeInGB"],
        "volume_kms_key": resources.get("VolumeKmsKeyId"),
        "keep_alive_period_in_seconds": resources.get("KeepAlivePeriodInSeconds"),
        "training_plan": resources.get("TrainingPlanArn"),
    }
    if "InstanceGroups" not in resources:
        return common | {"instance_type": resources["InstanceType"], "instance_count": resources["InstanceCount"]}
    from sagemaker.instance_group import InstanceGroup

    groups = [
        InstanceGroup(it["InstanceGroupName"], it["InstanceType"], it["InstanceCount"])
        for it in resources["InstanceGroups"]
    ]
    return common | {"instance_groups": groups}


def _launch(hyperparameters: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Distribution and what of it the SDK has no word for."""
    own = {name: value for name, value in hyperparameters.items() if name == _PROCESSES}
    smp = hyperparameters.get("mp_parameters")
    if not hyperparameters.get("sagemaker_torch_distributed_enabled"):
        return {"hyperparameters": own | ({} if smp is None else {"mp_parameters": smp})}
    found: dict[str, Any] = {"torch_distributed": {"enabled": True}}
    if smp is not None:
        found["smdistributed"] = {"modelparallel": {"enabled": True, "parameters": smp}}
    return {"distribution": found, "hyperparameters": own}


def channels(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request's channels as the SDK's inputs, but for that of job.json."""
    from sagemaker.inputs import FileSystemInput, TrainingInput

    code, _ = job_channel(request)
    found: dict[str, Any] = {}
    for channel in request["InputDataConfig"]:
        source = channel["DataSource"]
        if channel["ChannelName"] == code:
            continue
        if "S3DataSource" in source:
            s3 = source["S3DataSource"]
            found[channel["ChannelName"]] = TrainingInput(
                s3["S3Uri"], distribution=s3["S3DataDistributionType"], s3_data_type=s3["S3DataType"],
                input_mode=channel.get("InputMode"),
            )  # fmt: skip
        else:
            file_system = source["FileSystemDataSource"]
            found[channel["ChannelName"]] = FileSystemInput(
                file_system["FileSystemId"],
                file_system["FileSystemType"],
                file_system["DirectoryPath"],
                file_system["FileSystemAccessMode"],
            )
    return found


def job_channel(request: Mapping[str, Any]) -> tuple[str, str]:
    """Name and address of the channel with job.json."""
    from sm_llm.contract.job_file import JOB_CHANNEL

    found = next(it for it in request["InputDataConfig"] if it["ChannelName"] == JOB_CHANNEL)
    return JOB_CHANNEL, str(found["DataSource"]["S3DataSource"]["S3Uri"])
