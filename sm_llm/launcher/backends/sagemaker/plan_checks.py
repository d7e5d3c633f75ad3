"""Checks of a plan for SageMaker: every issue of its request at once, and what to warn of."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import REQUIREMENTS
from sm_llm.launcher.backends.sagemaker.request.addresses import address_warnings
from sm_llm.launcher.backends.sagemaker.request.arns import place_issues, place_warnings
from sm_llm.launcher.backends.sagemaker.request.disk import network_warnings, volume_issues, volume_warnings
from sm_llm.launcher.backends.sagemaker.request.fields import request_issues
from sm_llm.launcher.backends.sagemaker.request.limits import known_values
from sm_llm.launcher.backends.sagemaker.request.request import RunPlace, training_job
from sm_llm.launcher.backends.sagemaker.request.rules import account_issues, job_issues, job_warnings, model_issues
from sm_llm.launcher.backends.sagemaker.request.time_limit import QUOTA_SECONDS, time_issues, time_warnings
from sm_llm.launcher.backends.sagemaker.request.unusable import unusable_issues, unusable_warnings
from sm_llm.launcher.backends.sagemaker.target import decide
from sm_llm.launcher.display.lines import duration
from sm_llm.launcher.images import images
from sm_llm.launcher.planning.plan import Checks
from sm_llm.launcher.planning.program_checks import module_warnings, program_issues
from sm_llm.launcher.planning.removed_modules import import_warnings
from sm_llm.spec.tasks import ScriptTask, TrainTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.errors import Issue
    from sm_llm.launcher.backends.sagemaker.target import Decisions, SageMakerTarget
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.job import JobSpec

_STAND_IN_RUN = "-20000101-000000-0000"


def plan_checks(plan: Plan) -> Checks:
    """What is decided for the job's request, and every issue and warning of it. Touches nothing in the cloud."""
    job, decided = plan.job, decide(plan)
    own = list(job_issues(job))
    found = list(decided.issues)
    if own and isinstance(job.task, TrainTask) and not plan.total_flops:
        found = [it for it in found if it.path != "backend.max_run_seconds"]  # the time follows from what is faulty
    assumed, settings = decided.assumed, decided.settings
    if assumed is not None and settings is not None:
        found += place_issues(job, settings)
        found += account_issues(job, settings, decided.limit)
        found += unusable_issues(job, settings)
        found += _request_issues(job, assumed, [*found, *own])
    found += [*model_issues(plan), *volume_issues(plan), *time_issues(plan)]
    found += program_issues(job, decided.program, assumed.image if assumed is not None else None)
    origins = settings.origins if settings is not None else {}
    issues = [*own, *(_whence(issue, origins) for issue in found)]
    return Checks(decided.target, tuple(issues), tuple(_warnings(plan, decided)))


def _warnings(plan: Plan, decided: Decisions) -> Iterator[str]:
    yield from (*job_warnings(plan.job), *volume_warnings(plan), *time_warnings(plan))
    program, image = decided.program, decided.assumed.image if decided.assumed is not None else None
    if program is not None:
        yield from program.warnings
        if isinstance(plan.job.task, ScriptTask):
            entry = plan.job.task.entry
            yield from (*import_warnings(program, image, entry), *module_warnings(entry, program))
    if decided.settings is not None:
        has_requirements = program is not None and REQUIREMENTS in program.files
        yield from network_warnings(plan, decided.settings, has_requirements=has_requirements)
    if decided.target is not None:
        yield from _request_warnings(plan.job, decided.target)


def _whence(issue: Issue, origins: Mapping[str, str]) -> Issue:
    """A issue that names which file of the SDK's defaults its value is from, where it is from one."""
    origin = issue.origin or origins.get(issue.path) or origins.get(issue.path.rpartition(".")[2], "")
    return replace(issue, origin=origin)


def _request_issues(job: JobSpec, assumed: SageMakerTarget, known: Sequence[Issue]) -> list[Issue]:
    """What the service's own limits refuse of the request, but for fields that are reported already."""
    kind = job.compute.instance_type or ""  # its absence is a issue that is reported
    shown = job.model_copy(update={"compute": job.compute.model_copy(update={"instance_type": kind})})
    request = training_job(shown, assumed, _stand_in(shown))
    return list(request_issues(request, known))


def _stand_in(job: JobSpec) -> RunPlace:
    """The place of a run, with an id and a digest that only the launch knows."""
    run_id = f"{job.name}{_STAND_IN_RUN}"
    run_uri = f"{job.storage.rstrip('/')}/{run_id}"
    code = f"{job.storage.rstrip('/')}/bundles/{'0' * 64}/sourcedir.tar.gz"
    return RunPlace(run_id, run_uri, 1, code, f"{run_uri}/job/attempt-1/")


def _request_warnings(job: JobSpec, target: SageMakerTarget) -> Iterator[str]:
    kind = job.compute.instance_type
    if target.limit.max_run > QUOTA_SECONDS:
        yield (
            f"backend.max_run_seconds: {duration(target.limit.max_run)} is more than the 5 days that an account has "
            "before it asks for more (Service Quotas: longest run time of a training job)"
        )
    if kind not in known_values("TrainingInstanceType"):
        yield f"compute.instance_type: the installed botocore does not know {kind} for training jobs"
    yield from address_warnings(job)
    yield from place_warnings(job, target.settings)
    yield from unusable_warnings(job, target.settings)
    today = datetime.now(UTC).date()
    if target.image is not None and (warning := images.patch_warning(target.image, today)):
        yield f"backend.image_version: {warning}"
