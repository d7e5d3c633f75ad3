"""From a Plan to its Submission: job.json with absolute places, rendered by the backend. Writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sm_llm.contract.job_file import JobFile
from sm_llm.launcher.planning.inputs import absolute_inputs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sm_llm.launcher.backends.base import Submission
    from sm_llm.launcher.planning.plan import Plan


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
    from sm_llm.launcher.backends.registry import backend

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
