"""The record of a run that no launcher wrote: of a pipeline's step or a tuning job's trial, whose address only the
platform knows. With it the run is found, watched and stopped like any other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sm_llm.contract.job_file import RUN_FOLDER_ENVIRONMENT, job_run_store
from sm_llm.errors import SmLlmError
from sm_llm.runs.run_paths import STOP_FILE
from sm_llm.runs.run_record import Attempt, RunRecord, host_facts
from sm_llm.worker.job_reader import TRAINING_JOB
from sm_llm.worker.versions import versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.contract.job_file import JobFile
    from sm_llm.worker.context import WorkerContext

_REGIONS = ("SAGEMAKER_REGION", "AWS_REGION", "AWS_DEFAULT_REGION")


def keep_record(context: WorkerContext, environ: Mapping[str, str]) -> None:
    """Write the run's record where there is none, and name this training job in it; once, by the leader.

    A launcher has done both already. A store that does not answer is reported: the job itself needs no record.
    """
    # Only SageMaker starts jobs that no launcher of ours has written a record for.
    native_id = _training_job(environ)
    if native_id is None or not context.process.is_leader or RUN_FOLDER_ENVIRONMENT in environ:
        return
    run_store, number = job_run_store(context.job), context.job.attempt
    attempt = Attempt.claim(number, native_id)
    try:
        if not run_store.exists():
            run_store.create(_record(context.job).with_attempt(attempt))
        elif not attempt.is_open_in(held := run_store.record()):  # nor is it where somebody took this job for dead
            context.replaced_job = _replaced(held, attempt)
            run_store.store.delete([STOP_FILE])  # an earlier job was asked, whose attempt this one takes the place of
            spec = {"spec": context.job.spec.model_dump(mode="json"), "spec_digest": context.job.spec_digest}
            run_store.update(lambda held: held.with_attempt(attempt).model_copy(update=spec))
    except SmLlmError as error:
        context.notice(f"the run's record could not be written: {error}", "warning")


def _replaced(record: RunRecord, attempt: Attempt) -> str | None:
    """The job that held ``attempt``; None if it is the same job, started again."""
    held = record.attempt(attempt.number)
    # A container that the platform started again has the name of its first start: it replaces nobody.
    return held.native_id if held is not None and held.native_id not in ("", attempt.native_id) else None


def region_of(environ: Mapping[str, str]) -> str | None:
    """The AWS region that a container is in, where it is known."""
    return next((environ[it] for it in _REGIONS if environ.get(it)), None)


def _training_job(environ: Mapping[str, str]) -> str | None:
    name = environ.get(TRAINING_JOB)
    region = region_of(environ)
    return f"{region}/{name}" if name and region else None


def _record(job: JobFile) -> RunRecord:
    return RunRecord(
        run_id=job.run_id,
        name=job.spec.name,
        created=time.time(),
        spec=job.spec.model_dump(mode="json"),
        spec_digest=job.spec_digest,
        versions=versions(),
        host=host_facts(),
    )
