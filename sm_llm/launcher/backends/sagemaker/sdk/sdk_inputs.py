"""What ``fit`` of an estimator is given as inputs: which channels the job reads, and which settings of them work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.bucket_names import bucket_problem
from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.errors import Issue
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import known_values
from sm_llm.launcher.backends.sagemaker.request.limits import value_issues
from sm_llm.launcher.backends.sagemaker.request.request import read_channels
from sm_llm.spec.tasks import ScriptTask, TrainTask
from sm_llm.spec.validation.address_checks import check_input_variables
from sm_llm.storage.uri import is_s3

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.spec.job import JobSpec

# Settings are named by their path in an entry of InputDataConfig.
_S3 = "DataSource.S3DataSource."
_FILE_SYSTEM = "DataSource.FileSystemDataSource."
_PIPE_ONLY = "works in Pipe mode only, which no task reads"
# Setting of a channel -> values that work for our own tasks, and for a script; None is any, () is none.
_SETTINGS: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {
    f"{_S3}S3Uri": (None, None),
    f"{_S3}S3DataType": (("S3Prefix", "ManifestFile"), ("S3Prefix", "ManifestFile")),
    f"{_S3}S3DataDistributionType": (("FullyReplicated",), ("FullyReplicated", "ShardedByS3Key")),
    f"{_S3}InstanceGroupNames": ((), None),
    f"{_FILE_SYSTEM}FileSystemId": (None, None),
    f"{_FILE_SYSTEM}FileSystemType": (None, None),
    f"{_FILE_SYSTEM}DirectoryPath": (None, None),
    f"{_FILE_SYSTEM}FileSystemAccessMode": (None, None),
    "InputMode": (("File", "FastFile"), ("File", "FastFile")),
    "ContentType": ((), None),
}
# All distributions that the service has: where each of them works, a pipeline variable does.
_EVERY_DISTRIBUTION = {"FullyReplicated", "ShardedByS3Key"}
_WHY = {
    "InputMode": "Pipe mode gives a named pipe, and tasks read files",
    f"{_S3}S3DataDistributionType": "gives every node other files, and every process reads all rows",
    f"{_S3}InstanceGroupNames": "gives the other nodes no data, and every process reads all rows",
    f"{_S3}S3DataType": "no task reads it: augmented manifests work in Pipe mode only",
    "ContentType": "is read by no task",
    "CompressionType": _PIPE_ONLY,
    "RecordWrapperType": _PIPE_ONLY,
    "ShuffleConfig": f"{_PIPE_ONLY}; task.data.shuffle shuffles rows",
    f"{_S3}AttributeNames": _PIPE_ONLY,
}


def inputs_by_name(inputs: Any) -> dict[Any, Any]:
    """What ``fit`` is given, by channel; the SDK calls a single one ``training``."""
    return inputs if isinstance(inputs, dict) else {} if inputs is None else {"training": inputs}


def specified(inputs: Any) -> dict[str, dict[str, Any]]:
    """Inputs that ``fit`` was given and that have no issues, in the form of the specification's ``inputs``.

    Without those that have a pipeline variable in them.
    """
    given = inputs_by_name(inputs)
    return {name: _specified(value) for name, value in given.items() if not _has_variable(value)}


def variables_of(inputs: Any) -> dict[str, Any]:
    """Inputs that ``fit`` was given and that have a pipeline variable in them."""
    return {name: value for name, value in inputs_by_name(inputs).items() if _has_variable(value)}


def _has_variable(value: Any) -> bool:
    config = getattr(value, "config", None)
    return hasattr(value, "expr") or (config is not None and any(hasattr(it, "expr") for _, it in _leaves(config, "")))


def _specified(value: Any) -> dict[str, Any]:
    config = getattr(value, "config", None)
    if config is None:
        return {"uri": value, "mode": "File"}  # the mode of the request, which the SDK leaves a plain address
    source = config["DataSource"]
    if "S3DataSource" in source:
        s3 = source["S3DataSource"]
        found = {"uri": s3["S3Uri"], "mode": config.get("InputMode", "File")}
        more = {"distribution": s3.get("S3DataDistributionType"), "data_type": s3.get("S3DataType")}
        return {**found, **{name: text for name, text in more.items() if text is not None}}
    file_system = source["FileSystemDataSource"]
    return {
        "file_system_id": file_system["FileSystemId"],
        "file_system_type": file_system["FileSystemType"],
        "directory_path": file_system["DirectoryPath"],
        "access_mode": file_system["FileSystemAccessMode"],
    }


def input_issues(job: JobSpec, inputs: Mapping[Any, Any], *, has_network: bool) -> Iterator[Issue]:
    """Issues of the channels that ``fit`` is given for a job as its worker reads it.

    ``has_network`` is whether the job runs in a VPC, which file systems need.
    """
    read = read_channels(job)
    # Together with the job's own inputs, because two names may become one variable (a-b and a_b).
    names = dict.fromkeys((name for name in inputs if isinstance(name, str)), "")
    yield from check_input_variables(job.model_copy(update={"inputs": {**job.inputs, **names}}))
    for name, value in inputs.items():
        if not isinstance(name, str):
            problem = "the name of a channel must be text, not a pipeline variable"
            yield Issue(
                "channel-name-is-variable", "inputs", problem, getattr(name, "expr", name), "Write the name itself"
            )
            continue
        # Our own channel: fit adds it, and a tuner hands it back to us.
        if name == JOB_CHANNEL:
            continue
        path = f"inputs.{name}"
        if issues := list(_value_issues(path, value)):
            # The settings of what is not an input mean nothing.
            yield from issues
            continue
        if read is not None and name not in read:
            yield _unread(job, name, read, _uri(value))
        config = getattr(value, "config", None)
        if isinstance(config, dict):
            yield from _setting_issues(path, config, is_script=isinstance(job.task, ScriptTask))
            yield from _group_issues(path, config, [it.name for it in job.backend.node_groups])
            if "FileSystemDataSource" in config.get("DataSource", {}) and not has_network:
                remedy = "Set backend.vpc.subnets and backend.vpc.security_group_ids to the file system's"
                yield Issue(
                    "channel-file-system-without-vpc",
                    path,
                    "a file system can be mounted only inside its network",
                    remedy=remedy,
                )


def _value_issues(path: str, value: Any) -> Iterator[Issue]:
    """What is not an input, or what the service would refuse of one; variables of a pipeline have a default at most."""
    # What the SDK makes of a plain address.
    config = {"DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": value}}}
    if not isinstance(value, str) and not hasattr(value, "expr"):
        found = getattr(value, "config", None)
        if not isinstance(found, dict):
            yield Issue(
                "channel-invalid",
                path,
                "is not an input",
                value,
                "Write s3://bucket/prefix, a TrainingInput or FileSystemInput",
            )
            return
        config = found
    uri = config["DataSource"].get("S3DataSource", {}).get("S3Uri", "")
    texts = known_values(uri).every if hasattr(uri, "expr") else (uri,)
    if problems := [issue for text in texts if isinstance(text, str) for issue in _address_issues(path, text)]:
        yield from problems
    # A variable has no value yet that could be compared with the service's limits.
    elif not any(hasattr(it, "expr") for _, it in _leaves(config, "")):
        yield from value_issues("InputDataConfig.*", {**config, "ChannelName": "any"}, path)


def _address_issues(path: str, uri: str) -> Iterator[Issue]:
    remedy = "Write s3://bucket/prefix"
    if uri and not is_s3(uri):
        yield Issue("channel-address-invalid", path, "is not a prefix in S3", uri, remedy)
    elif uri and (problem := bucket_problem(uri.removeprefix("s3://").partition("/")[0])):
        yield Issue("channel-bucket-invalid", path, f"names no valid bucket: a name {problem}", uri, remedy)


def _unread(job: JobSpec, name: str, read: set[str], uri: Any) -> Issue:
    task = job.task
    reads = f"it reads {', '.join(sorted(read))}" if read else "it reads no channel"
    if isinstance(task, TrainTask) and task.data.format == "synthetic":
        reads = "it trains on RANDOM TOKENS (task.data.format=synthetic)"
    field = "task.data.train" if isinstance(task, TrainTask) else "a field of the task"
    whole = f"inputs.{name}={uri} {field}=inputs.{name}"
    if isinstance(task, TrainTask) and task.data.format == "synthetic":
        whole += " task.data.format=rows"
    remedy = f"Name it in the specification: {whole}; or leave it out"
    return Issue(
        "channel-unread", f"inputs.{name}", f"the {task.kind} task does not read this channel: {reads}", uri, remedy
    )


def _uri(value: Any) -> Any:
    # TrainingInput and FileSystemInput of the SDK keep the request's form in this attribute.
    config = getattr(value, "config", None) or {}
    uri = value if isinstance(value, str) else config.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
    return uri if isinstance(uri, str) else "URI"


def _setting_issues(path: str, config: Mapping[str, Any], *, is_script: bool) -> Iterator[Issue]:
    for setting, value in _leaves(config, ""):
        name = setting.rpartition(".")[2]
        allowed = _SETTINGS.get(setting, ((), ()))[is_script]
        if hasattr(value, "expr") and allowed:
            if set(allowed) != _EVERY_DISTRIBUTION:
                problem = "must be a value, not a pipeline variable: not every value works"
                yield Issue(
                    "channel-setting-is-variable",
                    f"{path}.{name}",
                    problem,
                    value.expr,
                    f"Write {' or '.join(allowed)}",
                )
            continue
        if allowed is None or value in allowed:
            continue
        remedy = f"Use {' or '.join(allowed)}" if allowed else "Leave it out"
        seen = getattr(value, "expr", value)
        yield Issue(
            "channel-setting-without-effect",
            f"{path}.{name}",
            _WHY.get(setting, "has no effect that the job knows of"),
            seen,
            remedy,
        )


def _group_issues(path: str, config: Mapping[str, Any], groups: Sequence[str]) -> Iterator[Issue]:
    """Instance groups that a channel is for and that the job does not have."""
    named = config["DataSource"].get("S3DataSource", {}).get("InstanceGroupNames") or []
    if unknown := [it for it in named if it not in groups]:
        remedy = f"Its groups: {', '.join(groups)}" if groups else "It has none: leave it out"
        problem = "names instance groups that the job does not have"
        yield Issue("channel-group-unknown", f"{path}.InstanceGroupNames", problem, unknown, remedy)


def _leaves(config: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every setting; ``ShuffleConfig`` is one."""
    for key, value in config.items():
        # Only these hold settings of their own; a list or ShuffleConfig is the value of one setting.
        if key in ("DataSource", "S3DataSource", "FileSystemDataSource"):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value
