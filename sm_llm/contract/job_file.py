"""job.json: everything the launcher hands to the worker, as one validated file; and the scripts that begin with it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.load import changed
from sm_llm.spec.tasks import TASK_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sm_llm.runs.run_store import RunStore

JOB_ENVIRONMENT = "SM_LLM_JOB_FILE"
"""Environment variable that names job.json inside the container."""

# Fields, and what is below them, that the request, the code bundle or the channels were made from.
_SETTLED = ("name", "backend", "compute", "storage", "inputs", "task.kind", "task.source")

RUN_FOLDER_ENVIRONMENT = "SM_LLM_RUN_FOLDER"
"""Environment variable with the folder from which a launcher on this machine uploads the files of a run."""

STORE_SECRET_ENVIRONMENT = "SM_LLM_STORE_SECRET"
"""Environment variable with a value that only this attempt's processes know: it signs their notes for one another."""

JOB_CHANNEL = "job"
"""Input channel that holds job.json where the platform mounts channels."""

QUEUED_ENVIRONMENT = "SM_LLM_QUEUED_AT"
BEGAN_ENVIRONMENT = "SM_LLM_BEGAN_AT"
"""When the scheduler queued this start of the job, and when it began: seconds since the epoch."""

BREAK_ENVIRONMENT = "SM_LLM_BREAK_BEFORE_STEPS"
"""For proofs of resume: comma-separated steps; before the n-th of them attempt n kills itself with SIGKILL."""


LINE_PREFIX = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "}
"""Makes torchrun, where it passes on what several processes print, begin their lines with ``rank_prefix``."""

# One text of an entrypoint for the checkout, the bundle and the run's folder.
_ENTRYPOINT = '''"""Entry point of {kind} jobs: everything it needs to know is in job.json."""

from sm_llm.contract.bootstrap import install_missing

install_missing(__file__)

from sm_llm.worker.main import program  # noqa: E402 - it needs what has just been installed

if __name__ == "__main__":  # helper processes that are spawned import this file again
    raise SystemExit(program("{kind}"))
'''


def channel_name(dotted_path: str) -> str:
    """Name of the input channel of a spec field: ``task.data.train`` -> ``data_train``."""
    return re.sub(r"[^A-Za-z0-9]+", "_", dotted_path.removeprefix("task.")).strip("_")


def rank_prefix(rank: int) -> str:
    """What the lines of one process begin with in the log of a node that has several."""
    return f"[rank {rank}] "


def _is_below(path: str, field: str) -> bool:
    return f"{path}.".startswith(f"{field}.")


def settled_issue(path: str) -> Issue | None:
    """The issue of changing a field that the request, the code bundle or the channels were made from."""
    if not any(_is_below(path, it) for it in _SETTLED):
        return None
    return Issue(
        "field-fixed-at-launch", path, "is settled once a job has been started", remedy="Set it before the launch"
    )


class JobFile(BaseModel):
    """One job as the worker reads it. ``spec`` holds resolved inputs: no ``inputs.…`` or ``steps.…`` is left."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    run_id: str
    attempt: int = Field(ge=1)
    run_uri: str
    """The run's folder or its address in S3 (the worker publishes below it)."""
    spec: JobSpec
    spec_digest: str
    channels: dict[str, str] = Field(default_factory=dict)
    """Input channels the backend mounts: name -> source URI."""
    resume: int | Literal["newest"] | None = None
    """A resume that somebody asked for: this attempt must continue from this run's own checkpoint, the one of exactly
    this step or the newest, and fail where there is none. None: by ``task.start``."""
    trackers: dict[str, str] = Field(default_factory=dict)
    """Tracker -> id that earlier attempts of this run were given there."""

    def changed(self, overrides: Sequence[str]) -> JobFile:
        """The same job with ``key.path=value`` texts merged into its specification.

        Raises ``SpecError`` for unknown keys and wrong values, and for what a container cannot change any more.
        """
        if not overrides:
            return self
        # Refused and not ignored: the request, the bundle and the channels were made before the container began.
        if late := [issue for text in overrides if (issue := settled_issue(text.partition("=")[0]))]:
            raise SpecError(late)
        loaded = changed(self.spec, overrides)
        return self.model_copy(update={"spec": loaded.spec, "spec_digest": loaded.digest})

    def write(self, path: Path) -> None:
        """Write atomically. Raises ``OSError``."""
        from sm_llm.storage.files import write_atomically

        write_atomically(path, json.dumps(self.model_dump(mode="json"), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """Read and validate; raises ``FileNotFoundError`` or ``pydantic.ValidationError``."""
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def job_run_store(job: JobFile) -> RunStore:
    """The store of the run that a job is an attempt of."""
    from sm_llm.runs.run_store import run_store_at

    return run_store_at(job.run_uri, job.spec.storage_options.model_dump())


def entrypoint_source(kind: str) -> str:
    """The script ``<kind>.py``. Raises ``ValueError`` for a kind that no task has."""
    if kind not in TASK_KINDS:
        raise ValueError(f"no task kind {kind!r}; there are {', '.join(TASK_KINDS)}")
    return _ENTRYPOINT.format(kind=kind)
