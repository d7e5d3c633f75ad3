"""Renders a plan as the request of a training job, with the code bundle and job.json that it needs in S3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.launcher.backend import Submission
from sm_llm.launcher.backends.sagemaker.request.request import (
    RunLocation,
    SageMakerTarget,
    mounted,
    seen_from_inside,
    with_locations,
)
from sm_llm.launcher.images.images import lock_text, stack_of
from sm_llm.launcher.planning.bundle import SOURCE_FOLDER, make_bundle
from sm_llm.runs.run_paths import JOB_FILE
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.inputs import input_location
from sm_llm.storage.uri import fill, parse

if TYPE_CHECKING:
    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.job import JobSpec


def render(plan: Plan, job: JobFile) -> Submission:
    """The CreateTrainingJob request, the code bundle and job.json. Reads files of this machine, nothing else."""
    target = plan.target
    assert isinstance(target, SageMakerTarget)
    spec, source = job.spec, target.program
    bundle = make_bundle(source, lock_of(spec))
    limited = spec.backend.model_copy(update={"max_run_seconds": target.limit.max_run})  # also where it is derived
    within = spec.model_copy(update={"backend": limited})
    inside = job.model_copy(
        update={
            "spec": seen_from_inside(within, SOURCE_FOLDER if source is not None else None),
            "channels": {name: input_location(value) for name, value in mounted(spec).items()},
        }
    )
    given = RunLocation(
        run_id=job.run_id,
        run_uri=job.run_uri,
        attempt=job.attempt,
        code_uri=f"{code_folder(spec)}/bundles/{bundle.key}",
        job_folder=f"{job.run_uri}/job/attempt-{job.attempt}/",  # closed: attempt-1 is not attempt-10
    )
    uploads = {
        given.code_uri: bundle.archive,
        f"{given.job_folder}{JOB_FILE}": inside.model_dump_json(indent=2).encode() + b"\n",
    }
    return Submission("sagemaker", inside, with_locations(spec, target, given), uploads)


def code_folder(job: JobSpec) -> str:
    """Below which address of S3 code bundles are kept, shared by all runs."""
    options = SageMakerOptions.of(job)
    if options.bucket is not None:
        return f"s3://{options.bucket}/sm_llm"
    return parse(fill(job.storage, run_name=job.name)).uri.rstrip("/")  # an emulated job's folder may be relative


def lock_of(job: JobSpec) -> str | None:
    """The packages to install on a stock image; None where the image has all of them."""
    options = SageMakerOptions.of(job)
    if options.image == "built":
        return None
    return lock_text(stack_of(job))
