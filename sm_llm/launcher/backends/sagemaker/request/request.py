"""The whole CreateTrainingJob request of a job, as a value: the SDK takes no part in it."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from sm_llm.contract.image_packages import WHEELHOUSE
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.launcher.backends.sagemaker.request.capacity import volume_size_gb
from sm_llm.launcher.images import images
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.inputs import MOUNT, FileSystemInput, Input, S3Input, input_location
from sm_llm.spec.tasks import TASK_KINDS
from sm_llm.terminal import counted, duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.backends.sagemaker.request.capacity import TimeLimit
    from sm_llm.launcher.backends.sagemaker.request.distribution import Distribution
    from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings
    from sm_llm.launcher.planning.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec


# CreateTrainingJob takes at most 63 letters, digits and hyphens as TrainingJobName.
LONGEST = 63
# The end of a run id of ours: day, time and four random digits; the step of a workflow may follow.
_STAMP = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{4}(?:-.*)?$")


def normalised(text: str) -> str:
    """``text`` with everything that a job's name cannot hold as a hyphen: ``my_base run`` -> ``my-base-run``."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "job"


def base_in_names(base: str) -> str:
    """How a base begins the names of jobs: normalised, and cut where the run's time and digits follow."""
    # Any time of the right form: only its length decides where the base is cut.
    tail = "-20260101-000000-0000"
    return job_name(f"x{tail}", 1, base).removesuffix(f"{tail}-1")


def job_name(run_id: str, attempt: int, base: str | None = None) -> str:
    """The name of an attempt's training job: ``<base>-<the run's time and random digits>-<attempt>``.

    The base is cut before the rest is added, so that the name stays unique; a run id that is not one of ours keeps its
    end.
    """
    match = _STAMP.search(run_id)
    stamp = match[0] if match else f"-{run_id}"
    head = base if base is not None else run_id[: match.start()] if match else ""
    tail = f"-{normalised(stamp)}-{attempt}"[-LONGEST + 1 :]
    return f"{normalised(head)[: LONGEST - len(tail)].rstrip('-')}{tail}".strip("-")


# Exponents whole, and what a run that has gone wrong prints. Rather nothing than a part of ``1,234.5``.
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|[-+]?inf)(?![\w,.])"

METRICS: dict[str, str] = {
    "train:loss": rf"\bLoss: {_NUMBER}",
    "train:tokens_per_second_per_device": rf"\| {_NUMBER} tokens/s/device",
    "train:mfu_percent": rf"\bMFU {_NUMBER}%",
    "train:grad_norm": rf"\bgrad norm {_NUMBER}",
    "train:learning_rate": rf"\blr {_NUMBER}",
    "train:data_wait_seconds": rf"\bdata wait {_NUMBER} s",
    "train:step": r"\bstep (\d+)/\d+",
    "validation:loss": rf"\bvalidation loss {_NUMBER}",
}
"""Name -> regular expression with one group. The events in the run's folder hold the exact numbers."""
VALIDATION = "validation:loss"
BETTER: dict[str, str] = {
    "train:loss": "Minimize",
    "train:tokens_per_second_per_device": "Maximize",
    "train:mfu_percent": "Maximize",
    "train:grad_norm": "Minimize",
    "train:data_wait_seconds": "Minimize",
    VALIDATION: "Minimize",
}
"""Metric -> the direction in which a tuning job improves it; the other metrics are not outcomes."""


def line_word(metric: str) -> str:
    """The words of the training line that one of ``METRICS`` is read from, beside its number."""
    parts = (re.sub(r"\\[b|]", "", it) for it in METRICS[metric].split(_NUMBER))
    return max(parts, key=len).strip()


def metric_definitions() -> list[dict[str, str]]:
    """The definitions as the service takes them."""
    return [{"Name": name, "Regex": regex} for name, regex in METRICS.items()]


CODE = "/opt/ml/code"
# A suffix begins with a letter: ``rows.jsonl`` is a file, ``Llama-3.1-8B`` and ``v1.5`` are folders.
_FILE = re.compile(r"\.[A-Za-z]\w*$")


def mounted(job: JobSpec) -> dict[str, Input]:
    """Inputs that become channels: those in S3 and on file systems. Others are read by the worker itself."""
    return {name: value for name, value in job.inputs.items() if _is_channel(value)}


def channels(job: JobSpec, job_folder: str) -> list[dict[str, Any]]:
    """``InputDataConfig``: every mounted input, and the folder in S3 that holds job.json."""
    inputs = {**mounted(job), JOB_CHANNEL: S3Input(uri=job_folder, mode="File")}
    return [_channel(name, value) for name, value in inputs.items()]


def seen_from_inside(job: JobSpec, source_folder: str | None) -> JobSpec:
    """The job as the worker reads it: mounted inputs by their folder, the bundled program in the folder of the code."""
    locations = {input_location(value): f"{MOUNT}/{name}" for name, value in mounted(job).items()}
    task = _replace(job.task.model_dump(), locations)
    if source_folder is not None and job.task.kind == "script":
        task["source"] = f"{CODE}/{source_folder}"
    return job.model_copy(update={"task": type(job.task).model_validate(task)})


def _is_channel(value: Input) -> bool:
    return not isinstance(value, str) or value.startswith("s3://")


def _channel(name: str, value: Input) -> dict[str, Any]:
    if isinstance(value, FileSystemInput):
        source = {
            "FileSystemDataSource": {
                "FileSystemId": value.file_system_id,
                "FileSystemType": value.file_system_type,
                "DirectoryPath": value.directory_path,
                "FileSystemAccessMode": value.access_mode,
            }
        }
        # No InputMode: a file system is mounted, and its files are read as they are.
        return {"ChannelName": name, "DataSource": source}
    wanted = value if isinstance(value, S3Input) else S3Input(uri=value)
    uri = _closed(wanted.uri) if wanted.data_type == "S3Prefix" else wanted.uri
    s3 = {"S3DataType": wanted.data_type, "S3Uri": uri, "S3DataDistributionType": wanted.distribution}
    mode = {} if wanted.mode == "File" else {"InputMode": wanted.mode}  # File is the whole request's mode
    return {"ChannelName": name, "DataSource": {"S3DataSource": s3}, **mode}


def _closed(uri: str) -> str:
    """A folder ends with "/", or run-1 would bring run-10 as well; a name with a file's suffix is a file."""
    return uri if uri.endswith("/") or _FILE.search(uri) else f"{uri}/"


def _replace(value: Any, locations: Mapping[str, str]) -> Any:
    """Every text that is one of ``locations``, or lies below one, by the folder it is mounted at."""
    if isinstance(value, dict):
        return {key: _replace(item, locations) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, locations) for item in value]
    if isinstance(value, str):
        # Compared by whole path components, so that s3://b/run-1 does not match s3://b/run-10.
        for uri, folder in locations.items():
            base = uri.rstrip("/")
            if value.rstrip("/") == base or value.startswith(f"{base}/"):
                return f"{folder}{value[len(base) :]}".rstrip("/")
    return value


def read_channels(job: JobSpec) -> set[str] | None:
    """Names of the channels that a job, as its worker reads it, takes data from; None for a program's: it may read any.

    ``job`` is what ``seen_from_inside`` gives.
    """
    if job.task.kind == "script":
        return None
    inside = (PurePosixPath(text) for text in _texts(job.task.model_dump()) if text.startswith(f"{MOUNT}/"))
    return {location.relative_to(MOUNT).parts[0] for location in inside}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


RUN_TAG = "sm_llm:run"
"""Tag with the address of the run that a job is an attempt of."""
ATTEMPT_TAG = "sm_llm:attempt"
NAME_TAG = "sm_llm:name"
"""Tag with the name as it was given, before it was made fit for the service."""
# logging.INFO: with WARNING the toolkit would not print the command that it starts.
_LOG_LEVEL = 20


@dataclass(frozen=True)
class SageMakerTarget:
    """Everything that a request takes from outside the job's own fields."""

    settings: JobSettings
    image_uri: str
    image: images.Image | None
    """The row of the table of images; None where the specification names an address."""
    is_stock: bool
    """Whether what the image lacks is installed on every node."""
    limit: TimeLimit
    distribution: Distribution
    command: tuple[tuple[str, ...], ...]
    program: SourceTree | None = None
    """The files of the user's program, where they are on this machine."""
    request: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What every run of the job sends alike."""

    @property
    def facts(self) -> dict[str, str]:
        """The decisions in words."""
        limit = self.limit
        wait = f", waiting included {duration(limit.max_wait)}" if limit.max_wait is not None else ""
        facts = {
            "image": self.image_uri,
            "image mode": "stock (what it lacks is installed once per node)" if self.is_stock else "built",
            "time limit": f"{duration(limit.max_run)}{wait} ({limit.reason})",
            "role": self.settings.role or "a variable of the pipeline",
            "region": str(self.settings.region),
        }
        if self.image is not None and self.image.note:
            facts["image note"] = self.image.note
        if self.image is not None and self.image.patched_until is not None:
            facts["image patches"] = f"until {self.image.patched_until} (table of {images.TABLE_DATE})"
        if self.program is not None:
            out = f", {len(self.program.left_out)} left out" if self.program.left_out else ""
            facts["program"] = f"{counted(len(self.program.files), 'file')}, {self.program.bytes / 1e6:.1f} MB{out}"
        return facts | {f"{name} from": origin for name, origin in self.settings.origins.items()}


@dataclass(frozen=True)
class RunLocation:
    """What only the launch of a run knows of its request."""

    run_id: str
    run_uri: str
    attempt: int
    code_uri: str
    """The bundle's archive in S3."""
    job_folder: str
    """The folder in S3 that holds job.json."""


def training_job(job: JobSpec, target: SageMakerTarget) -> dict[str, Any]:
    """The part of the request that every run of the job shares: without names, addresses and inputs, which
    ``with_locations`` adds.
    """
    options, settings = SageMakerOptions.of(job), target.settings
    request: dict[str, Any] = {
        "RoleArn": settings.role,
        "AlgorithmSpecification": _algorithm(options, target),
        "ResourceConfig": _resources(job, options, settings),
        "StoppingCondition": _stopping(target.limit),
        # The worker profiles by itself (task.logging.profile).
        "ProfilerConfig": {"DisableProfiler": True},
    }
    variables = _environment(job, options, target)
    return request | ({"Environment": variables} if variables else {}) | _switches(options, settings)


def with_locations(job: JobSpec, target: SageMakerTarget, given: RunLocation) -> dict[str, Any]:
    """The whole request of an attempt. Equal inputs give equal requests; nothing is decided here.

    ``job`` is that of ``target``, with the places of its inputs as they are known by now.
    """
    options, settings = SageMakerOptions.of(job), target.settings
    name = job_name(given.run_id, given.attempt, options.base_job_name)
    return {
        # A copy, because one target serves every attempt of a run and every execution of a pipeline.
        **copy.deepcopy(target.request),
        "TrainingJobName": name,
        "InputDataConfig": channels(job, given.job_folder),
        "OutputDataConfig": _output(given, settings),
        "HyperParameters": _hyperparameters(job, target, given, name),
        "Tags": _tags(job, options, settings, given),
    }


def _environment(job: JobSpec, options: SageMakerOptions, target: SageMakerTarget) -> dict[str, str]:
    """Variables of the container: defaults of the SDK, then those of the instance type, then the job's own."""
    wheels = {WHEELHOUSE: options.wheelhouse} if options.wheelhouse else {}
    return {**target.settings.environment, **target.distribution.environment, **wheels, **job.environment}


def _algorithm(options: SageMakerOptions, target: SageMakerTarget) -> dict[str, Any]:
    # File is the mode of channels that name none, such as the one with job.json.
    algorithm: dict[str, Any] = {"TrainingImage": target.image_uri, "TrainingInputMode": "File"}
    if options.metric_definitions:
        algorithm["MetricDefinitions"] = metric_definitions()
        algorithm["EnableSageMakerMetricsTimeSeries"] = True  # as the SDK's PyTorch sends since PyTorch 1.3
    return algorithm


def _output(given: RunLocation, settings: JobSettings) -> dict[str, str]:
    """Where SageMaker puts what is left in its own folders; nothing large is: the worker publishes by itself."""
    # What is left there is small, so compressing it gains nothing.
    output = {"S3OutputPath": f"{given.run_uri}/sagemaker", "CompressionType": "NONE"}
    key = settings.output_kms_key_id
    return output | ({"KmsKeyId": key} if key else {})


def _resources(job: JobSpec, options: SageMakerOptions, settings: JobSettings) -> dict[str, Any]:
    compute = job.compute
    resources: dict[str, Any] = {"VolumeSizeInGB": volume_size_gb(job)}
    if options.instance_groups:
        resources["InstanceGroups"] = [
            {"InstanceGroupName": it.name, "InstanceType": it.instance_type, "InstanceCount": it.instance_count}
            for it in options.instance_groups
        ]
    else:
        # Its absence is an issue that is reported; the rest of the request is checked all the same.
        resources |= {"InstanceType": compute.instance_type or "", "InstanceCount": compute.instance_count}
    optional = {
        "VolumeKmsKeyId": settings.volume_kms_key_id,
        "KeepAlivePeriodInSeconds": options.keep_alive_period_in_seconds,
        "TrainingPlanArn": options.training_plan_arn,
    }
    return resources | {name: value for name, value in optional.items() if value is not None}


def _stopping(limit: TimeLimit) -> dict[str, int]:
    stopping = {"MaxRuntimeInSeconds": limit.max_run}
    return stopping | ({"MaxWaitTimeInSeconds": limit.max_wait} if limit.max_wait is not None else {})


def request_region(request: Mapping[str, Any]) -> str:
    """The region that a request was rendered for."""
    return str(json.loads(request["HyperParameters"]["sagemaker_region"]))


def _hyperparameters(job: JobSpec, target: SageMakerTarget, given: RunLocation, name: str) -> dict[str, str]:
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
        # The parameter holds one type, and each group may have another.
        parameters = {key: value for key, value in parameters.items() if key != "sagemaker_instance_type"}
    return parameters


def _tags(job: JobSpec, options: SageMakerOptions, settings: JobSettings, given: RunLocation) -> list[dict[str, str]]:
    """The user's tags, then ours: how a job is found again, and names as they were given."""
    ours = {RUN_TAG: given.run_uri, ATTEMPT_TAG: str(given.attempt)}
    base = options.base_job_name or job.name
    ours[NAME_TAG] = base if normalised(base) != base else job.name
    # Ours come last, because the run is found again by them.
    return [{"Key": key, "Value": value} for key, value in {**settings.tags, **ours}.items()]


def _switches(options: SageMakerOptions, settings: JobSettings) -> dict[str, Any]:
    """Parts of the request that are there only when they are wanted."""
    switches: dict[str, Any] = {}
    if settings.subnets:
        # Absent unless asked for: an empty VpcConfig is refused, and so are empty lists in it.
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
