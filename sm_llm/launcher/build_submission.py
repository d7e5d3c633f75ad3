"""From a Plan to a Submission in a run's folder: the record, the absolute inputs, the channels and job.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.launcher.job_inputs import anchored, code_digest, rendered
from sm_llm.runs.events.events import event_files, read_file
from sm_llm.runs.git_state import git_state
from sm_llm.runs.locate import launch_folder
from sm_llm.runs.run_record import RunRecord, host_facts, package_versions
from sm_llm.spec.job import WorkflowSpec
from sm_llm.spec.loading.defaults import read_defaults

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.runs.run_store import RunStore
    from sm_llm.spec.job import JobSpec

RECORDED_PACKAGES = (
    "sm_llm", "torch", "transformers", "tokenizers", "fastokens", "safetensors", "datasets",
    "numpy", "pyarrow", "pydantic", "awscrt", "boto3", "kubernetes",
)  # fmt: skip


def new_record(
    run_id: str,
    spec: JobSpec | WorkflowSpec,
    digest: str,
    origins: Mapping[str, str],
    plan: list[dict[str, Any]],
    *,
    created: float,
    folder: Path | None = None,
    made_from: str | None = None,
) -> RunRecord:
    """The record of a run that is about to start for the first time.

    ``folder`` is what relative inputs are relative to (the working directory), ``made_from`` the run it repeats.
    """
    return RunRecord(
        run_id=run_id,
        name=spec.name,
        created=created,
        spec=spec.model_dump(mode="json"),
        spec_digest=digest,
        origins=dict(origins),
        plan=plan,
        git=git_state(folder or Path.cwd(), with_diff=read_defaults(os.environ).values.record_git_diff),
        versions=package_versions(RECORDED_PACKAGES),
        code_digest=code_digest(),
        host={**host_facts(), "folder": str(folder or Path.cwd())},
        made_from=made_from,
    )


def recorded_workflow(run_store: RunStore, record: RunRecord) -> WorkflowSpec:
    """The workflow in ``record``; its relative inputs are those of the folder that it was launched from."""
    spec, folder = record.load_spec(), launch_folder(run_store, record)
    if folder is not None and folder != Path.cwd():  # places keep their names where they mean the same
        spec = anchored(spec, folder)
    assert isinstance(spec, WorkflowSpec)
    return spec


def build_submission(
    plan: Plan, run_store: RunStore, record: RunRecord, *, resume: int | Literal["newest"] | None = None,
    digest: str = "", folder: Path | None = None,
) -> Submission:  # fmt: skip
    """The submission of the next attempt of the run at ``run_store``. Writes nothing.

    ``resume`` is the checkpoint it must continue from, ``digest`` that of a specification changed since the record,
    ``folder`` what relative inputs are relative to (the working directory).
    """
    return rendered(
        plan,
        record.run_id,
        run_store.uri,
        attempt=record.next_attempt,
        digest=digest or record.spec_digest,
        resume=resume,
        trackers=known_trackers(run_store, record),
        folder=folder,
    )


def known_trackers(run_store: RunStore, record: RunRecord) -> dict[str, str]:
    """The run's ids at experiment trackers, those that only a killed supervisor's attempt has reported included."""
    found = dict(record.trackers)
    unclosed = {it.number for it in record.attempts if it.ended is None}
    if unclosed:
        run_store.refresh("events/")
    for attempt, _, path in event_files(run_store.paths.events):
        if attempt in unclosed:
            opened = (event for _, event in read_file(path) if event["kind"] == "tracker_opened")
            found.update((event["tracker"], event["id"]) for event in opened)
    return found
