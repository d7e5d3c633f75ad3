"""Input channels: what SageMaker mounts for a job, and the task that reads from there."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.spec.inputs import MOUNT, FileSystemInput, Input, S3Input, input_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.spec.job import JobSpec

CODE = "/opt/ml/code"
_FILE = re.compile(r"\.[A-Za-z]\w*$")
"""A suffix begins with a letter: ``rows.jsonl`` is a file, ``Llama-3.1-8B`` and ``v1.5`` are folders."""


def mounted(job: JobSpec) -> dict[str, Input]:
    """Inputs that become channels: those in S3 and on file systems. Others are read by the worker itself."""
    return {name: value for name, value in job.inputs.items() if _is_channel(value)}


def channels(job: JobSpec, job_folder: str) -> list[dict[str, Any]]:
    """``InputDataConfig``: every mounted input, and the folder in S3 that holds job.json."""
    inputs = {**mounted(job), JOB_CHANNEL: S3Input(uri=job_folder, mode="File")}
    return [_channel(name, value) for name, value in inputs.items()]


def seen_from_inside(job: JobSpec, source_folder: str | None) -> JobSpec:
    """The job as the worker reads it: mounted inputs by their folder, the bundled program in the folder of the code."""
    places = {input_place(value): f"{MOUNT}/{name}" for name, value in mounted(job).items()}
    task = _replace(job.task.model_dump(), places)
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
        return {"ChannelName": name, "DataSource": source}
    wanted = value if isinstance(value, S3Input) else S3Input(uri=value)
    uri = _closed(wanted.uri) if wanted.data_type == "S3Prefix" else wanted.uri
    s3 = {"S3DataType": wanted.data_type, "S3Uri": uri, "S3DataDistributionType": wanted.distribution}
    mode = {} if wanted.mode == "File" else {"InputMode": wanted.mode}  # File is the whole request's mode
    return {"ChannelName": name, "DataSource": {"S3DataSource": s3}, **mode}


def _closed(uri: str) -> str:
    """A folder ends with "/", or run-1 would bring run-10 as well; a name with a file's suffix is a file."""
    return uri if uri.endswith("/") or _FILE.search(uri) else f"{uri}/"


def _replace(value: Any, places: Mapping[str, str]) -> Any:
    """Every text that is one of ``places``, or lies below one, by the folder it is mounted at."""
    if isinstance(value, dict):
        return {key: _replace(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, places) for item in value]
    if isinstance(value, str):
        for uri, folder in places.items():
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
    return {place.relative_to(MOUNT).parts[0] for place in inside}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
