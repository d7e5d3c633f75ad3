"""From a Plan to a Submission in a run's folder: the record, the absolute inputs, the channels and job.json."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JobFile
from sm_llm.contract.run_record import RunRecord, git_state, host_facts, package_versions
from sm_llm.launcher.checks import local_folder
from sm_llm.launcher.container import channel_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.launcher.backends.base import Submission
    from sm_llm.launcher.plan import Plan
    from sm_llm.spec.job import JobSpec, WorkflowSpec

RECORDED_PACKAGES = (
    "sm_llm", "torch", "transformers", "tokenizers", "fastokens", "safetensors", "datasets",
    "numpy", "pyarrow", "pydantic", "awscrt",
)  # fmt: skip


def mint_run_id(name: str, at: float | None = None, tail: str | None = None) -> str:
    """``<name>-<UTC date>-<time>-<4 hex digits>``: sorts by time, unique without asking anyone."""
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(time.time() if at is None else at))
    return f"{name}-{moment}-{tail or secrets.token_hex(2)}"


def new_record(
    run_id: str,
    spec: JobSpec | WorkflowSpec,
    digest: str,
    origins: Mapping[str, str],
    plan: list[dict[str, Any]],
    *,
    created: float,
) -> RunRecord:
    """The record of a run that is about to start for the first time."""
    return RunRecord(
        run_id=run_id,
        name=spec.name,
        created=created,
        spec=spec.model_dump(mode="json"),
        spec_digest=digest,
        origins=dict(origins),
        plan=plan,
        git=git_state(Path.cwd()),
        versions=package_versions(RECORDED_PACKAGES),
        host={**host_facts(), "folder": os.getcwd()},
    )


def stage(plan: Plan, root: Path, record: RunRecord) -> Submission:
    """The submission of the next attempt of the run in ``root``. Writes nothing."""
    from sm_llm.launcher.backends.registry import backend

    job, channels = absolute_inputs(plan.job)
    job_file = JobFile(
        run_id=record.run_id,
        attempt=record.next_attempt,
        run_uri=str(root),
        spec=job,
        spec_digest=record.spec_digest,
        channels=channels,
    )
    return backend(job.backend.name).render(plan, job_file)


def absolute_inputs(job: JobSpec) -> tuple[JobSpec, dict[str, str]]:
    """The job with every local input as an absolute path (workers run in another folder), and its input channels."""
    from sm_llm.spec.references import sources

    task = job.task.model_dump()
    channels: dict[str, str] = {}
    for dotted, value in sources(job).items():
        place, at, step = value.rpartition("@")
        place, suffix = (place, at + step) if place and step.isdigit() else (value, "")
        folder = local_folder(place)
        if folder is not None and folder.exists():
            _put(task, dotted.split(".")[1:], f"{folder}{suffix}")
            channels[channel_name(dotted)] = str(folder)
    return job.model_copy(update={"task": type(job.task).model_validate(task)}), channels


def _put(value: Any, path: list[str], new: str) -> None:
    for key in path[:-1]:
        value = value[int(key) if isinstance(value, list) else key]
    value[int(path[-1]) if isinstance(value, list) else path[-1]] = new
