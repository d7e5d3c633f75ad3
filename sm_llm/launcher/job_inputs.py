"""What a job reads and sends from this machine: absolute inputs, channels, manifests, and so its submission."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.contract.job_file import JobFile, channel_name
from sm_llm.errors import StorageError
from sm_llm.launcher.planning.local_paths import local_folder
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.references import outputs, sources, workflow_job
from sm_llm.storage.uri import run_and_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_record import InputManifest
    from sm_llm.spec.inputs import Input
    from sm_llm.spec.tasks import Task


# Values of ``tracking_uri`` without a scheme that name no folder.
_MLFLOW_SERVERS = ("databricks", "databricks-uc", "uc")
CONTENT_BYTES = 1 << 30
"""Inputs up to this size are read for their digest when an attempt starts (a second or so from a local disk)."""


def absolute_inputs(job: JobSpec, base: Path | None = None) -> tuple[JobSpec, dict[str, str]]:
    """The job with every local input as an absolute path (workers run in another folder), and its input channels.

    Relative paths are taken from ``base``, by default the working directory; an input that is not there stays as it
    is. The folders that the task writes to become absolute as well, there or not.
    """
    task = job.task.model_dump()
    channels: dict[str, str] = {}
    for dotted, value in sources(job).items():
        # Of RUN@STEP only RUN is a place; the step is put back behind its absolute path.
        location, _ = run_and_step(value)
        suffix = value[len(location) :]
        folder = local_folder(location, base)
        if folder is not None and folder.exists():
            _put(task, dotted.split(".")[1:], f"{folder}{suffix}")
            channels[channel_name(dotted)] = str(folder)
    for dotted, folder in output_folders(job, base).items():
        _put(task, dotted.split(".")[1:], str(folder))
    update = {"task": type(job.task).model_validate(task), "inputs": _anchored_inputs(job.inputs, base or Path.cwd())}
    return job.model_copy(update=update), channels


def relative_inputs(spec: JobSpec | WorkflowSpec) -> set[str]:
    """Dotted paths of the inputs that are relative to the working directory, there or not."""
    jobs = {"": spec} if isinstance(spec, JobSpec) else {f"steps.{it}.": workflow_job(spec, it) for it in spec.steps}
    return {
        f"{prefix}{dotted}"
        for prefix, job in jobs.items()
        for dotted, value in {**{f"inputs.{name}": it for name, it in job.inputs.items()}, **sources(job)}.items()
        if isinstance(value, str)
        and local_folder(value) is not None
        and not ("://" in value or Path(value).expanduser().is_absolute())
    }


def output_folders(job: JobSpec, base: Path | None = None) -> dict[str, Path]:
    """Dotted path -> folder, beside the storage, that the task writes to on this machine, there or not.

    Relative paths are taken from ``base``, by default the working directory.
    """
    named = {dotted: location for dotted, location in outputs(job).items() if _is_folder(location)}
    found = {dotted: local_folder(location, base or Path.cwd()) for dotted, location in named.items()}
    return {dotted: folder for dotted, folder in found.items() if folder is not None}


def _is_folder(location: str) -> bool:
    # host:port is a server of MLflow.
    return location.startswith("file://") or (":" not in location and location not in _MLFLOW_SERVERS)


def anchored(spec: JobSpec | WorkflowSpec, base: Path) -> JobSpec | WorkflowSpec:
    """A specification whose local inputs, relative to ``base``, are absolute: it can be planned from anywhere."""
    if isinstance(spec, JobSpec):
        return absolute_inputs(spec, base)[0]
    steps = {
        name: step.model_copy(
            update={
                "task": _anchored_task(workflow_job(spec, name), base),
                "inputs": _anchored_inputs(step.inputs, base),
            }
        )
        for name, step in spec.steps.items()
    }
    return spec.model_copy(update={"steps": steps})


def _anchored_task(job: JobSpec, base: Path) -> Task:
    return absolute_inputs(job, base)[0].task


def _anchored_inputs(locations: dict[str, Input], base: Path) -> dict[str, Input]:
    folders = {name: local_folder(location, base) for name, location in locations.items() if isinstance(location, str)}
    return {
        name: str(folder) if (folder := folders.get(name)) is not None and folder.exists() else location
        for name, location in locations.items()
    }


def _put(value: Any, path: list[str], new: str) -> None:
    for key in path[:-1]:
        value = value[int(key) if isinstance(value, list) else key]
    value[int(path[-1]) if isinstance(value, list) else path[-1]] = new


def input_manifests(job: JobSpec, content_bytes: int = CONTENT_BYTES) -> dict[str, InputManifest]:
    """Dotted path -> manifest of every input that lies on this machine, except runs to continue from.

    The checkpoint an attempt starts from is in its own commit.
    """
    found = {}
    for dotted, value in sources(job).items():
        folder = local_folder(value)
        if folder is not None and folder.exists() and not dotted.startswith("task.start.checkpoint"):
            found[dotted] = manifest(folder, content_bytes, is_program=dotted == "task.source")
    return found


def manifest(location: Path, content_bytes: int = CONTENT_BYTES, *, is_program: bool = False) -> InputManifest:
    """What a file or folder holds now, runs inside it left out; of a program's folder what is copied for a node.

    Raises ``StorageError`` if it cannot be read.
    """
    from sm_llm.contract.program_tree import ProgramTree
    from sm_llm.runs.run_folders import files_outside_runs
    from sm_llm.runs.run_record import InputManifest

    try:
        folder_files = ProgramTree(location).files if is_program else lambda: files_outside_runs(location)[0]
        files = [location] if location.is_file() else folder_files()
        stats = [file.stat() for file in files]
        total = sum(stat.st_size for stat in stats)
        names = [file.relative_to(location).as_posix() for file in files]
        if total <= content_bytes:
            listing: list[Any] = [[name, _checksum(file)] for name, file in zip(names, files, strict=True)]
        else:
            # Reading large inputs would delay every launch, so their sizes and times stand for their contents.
            listing = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in zip(names, stats, strict=True)]
    except (OSError, ValueError) as error:
        raise StorageError(f"{location}: cannot be read: {error}") from error
    of: Literal["content", "listing"] = "content" if total <= content_bytes else "listing"
    return InputManifest(uri=str(location), files=len(files), bytes=total, digest=_digest(listing), of=of)


def _checksum(file: Path) -> str:
    from sm_llm.storage.checksum import crc64_file

    return crc64_file(file)


def _digest(listing: list[Any]) -> str:
    from sm_llm.storage.checksum import crc64_bytes

    return crc64_bytes(json.dumps(listing).encode())


def code_digest() -> str:
    """SHA-256 (64 hex digits) over names and contents of this package's files: which code launched a run."""
    from sm_llm.package import PACKAGE

    digest = hashlib.sha256()
    for file in sorted(it for it in PACKAGE.rglob("*") if it.suffix in (".py", ".yaml", ".j2")):
        body = file.read_bytes()
        # The length marks where a file ends, so that bytes cannot move to the next one unnoticed.
        digest.update(f"{file.relative_to(PACKAGE).as_posix()} {len(body)}\n".encode())
        digest.update(body)
    return digest.hexdigest()


def rendered(
    plan: Plan,
    run_id: str,
    run_uri: str,
    *,
    attempt: int = 1,
    digest: str = "",
    resume: int | Literal["newest"] | None = None,
    trackers: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Submission:
    """The submission of one attempt of the run ``run_id``, whose folder is at ``run_uri``.

    ``digest`` is that of the specification as its record holds it (the plan's own), ``resume`` the checkpoint that the
    attempt must continue from, ``trackers`` the ids that earlier attempts were given, ``folder`` what relative inputs
    are relative to (the working directory).
    """
    from sm_llm.launcher.backend import backend

    job, channels = absolute_inputs(plan.job, folder)
    job_file = JobFile(
        run_id=run_id,
        attempt=attempt,
        run_uri=run_uri,
        spec=job,
        spec_digest=digest or plan.digest,
        channels=channels,
        resume=resume,
        trackers=dict(trackers or {}),
    )
    return backend(job.backend.name).render(plan, job_file)
