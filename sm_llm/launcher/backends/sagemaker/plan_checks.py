"""Decides what a training job gets, once, and checks the plan for SageMaker: its phases backend and request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import REQUIREMENTS
from sm_llm.errors import Issue, PlanError, warning
from sm_llm.launcher.backends.sagemaker.request.capacity import (
    QUOTA_SECONDS,
    TimeLimit,
    network_warnings,
    time_issues,
    time_limit,
    time_warnings,
    volume_issues,
    volume_warnings,
)
from sm_llm.launcher.backends.sagemaker.request.distribution import distribution
from sm_llm.launcher.backends.sagemaker.request.limits import known_values, request_issues
from sm_llm.launcher.backends.sagemaker.request.request import (
    RunLocation,
    SageMakerTarget,
    training_job,
    with_locations,
)
from sm_llm.launcher.backends.sagemaker.request.request_addresses import (
    address_warnings,
    location_issues,
    location_warnings,
)
from sm_llm.launcher.backends.sagemaker.request.request_rules import (
    account_issues,
    job_issues,
    job_warnings,
    unusable_issues,
    unusable_warnings,
)
from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings, setting_issues, settings
from sm_llm.launcher.images import images
from sm_llm.launcher.planning.bundle import local_source
from sm_llm.launcher.planning.plan import Checks
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.tasks import TASK_KINDS, ScriptTask, starts_ranks
from sm_llm.spec.validation.runner import at_new_paths, run
from sm_llm.terminal import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.launcher.images.images import Image
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.planning.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.validation.runner import Checker

# Stand-ins of the right form, so that limits of the service are checked although the account is not known.
_ANY_ROLE = "arn:aws:iam::123456789012:role/any"
_ANY_REGION = "us-east-1"
# The training toolkit's own.
_MASTER_PORT = "7777"


@dataclass(frozen=True)
class Decisions:
    """The decisions of a job, as far as they can be made, and every issue on the way."""

    target: SageMakerTarget | None
    """None with any issue."""
    assumed: SageMakerTarget | None
    """The same with stand-ins for what cannot be decided, so that the rest of a request is checked all the same; None
    where the defaults of the SDK cannot be read."""
    settings: JobSettings | None
    limit: TimeLimit | None
    program: SourceTree | None
    issues: tuple[Issue, ...]


def decide(plan: Plan) -> Decisions:
    """The decisions of a plan; the only place that makes them."""
    job = plan.job
    options = SageMakerOptions.of(job)
    program = local_source(job.task.source) if isinstance(job.task, ScriptTask) else None
    try:
        found = settings(job)
    except PlanError as error:
        return Decisions(None, None, None, None, program, error.issues)
    issues = setting_issues(found)
    # The table has an address for each region; a missing region is an issue of its own already.
    image, address = _image(job, found.region or _ANY_REGION, issues)
    limit = time_limit(job, plan.total_flops)
    known = limit if isinstance(limit, TimeLimit) else None
    assumed = SageMakerTarget(
        settings=replace(found, role=found.role or _ANY_ROLE, region=found.region or _ANY_REGION),
        # This text is not checked: the issues state why the address is missing.
        image_uri=address or "image",
        image=image,
        is_stock=options.image == "stock",
        limit=known or TimeLimit(1, None, ""),
        distribution=distribution(job),
        command=_command(job),
        program=program,
    )
    assumed = replace(assumed, request=training_job(job, assumed))
    if isinstance(limit, Issue):
        issues.append(limit)
    # The stand-ins of the assumed target must never reach a request.
    is_whole = not issues and address is not None and known is not None
    target = assumed if found.role else _without_role(job, assumed)
    return Decisions(target if is_whole else None, assumed, found, known, program, tuple(issues))


def _without_role(job: JobSpec, assumed: SageMakerTarget) -> SageMakerTarget:
    """The target of a job whose role an argument of the SDK gives."""
    target = replace(assumed, settings=replace(assumed.settings, role=None))
    return replace(target, request=training_job(job, target))


def _image(job: JobSpec, region: str, issues: list[Issue]) -> tuple[images.Image | None, str | None]:
    """The row of the table, if it is one of the table's, and the address."""
    options = SageMakerOptions.of(job)
    if options.image_uri is not None:
        return None, options.image_uri
    row = images.choose(job, options.image_version)
    address = row if isinstance(row, Issue) else images.uri(row, region)
    if isinstance(row, Issue) or isinstance(address, Issue):
        # Without a row the address is the same issue, which is added once.
        issues += [it for it in (row, address) if isinstance(it, Issue)][:1]
        return None, None
    return row, address


def _command(job: JobSpec) -> tuple[tuple[str, ...], ...]:
    """The command that the training toolkit runs on every node."""
    nodes, program = job.compute.instance_count, TASK_KINDS[job.task.kind].entrypoint
    if not starts_ranks(job.task):
        return tuple(("python", program) for _ in range(nodes))
    first = ("torchrun", "--nnodes", str(nodes), "--nproc_per_node", str(job.compute.processes))
    torchrun = ("--master_addr", "algo-1", "--master_port", _MASTER_PORT, "--node_rank")
    return tuple((*first, *((*torchrun, str(node)) if nodes > 1 else ()), program) for node in range(nodes))


# As long as the end of a real run id, so that limits on lengths are checked with the length they will have.
_STAND_IN_RUN = "-20000101-000000-0000"


@dataclass(frozen=True)
class Decided:
    """A plan, and what was decided for its request."""

    plan: Plan
    decisions: Decisions

    @property
    def image(self) -> Image | None:
        """The row of the table of images, where it is known."""
        assumed = self.decisions.assumed
        return assumed.image if assumed is not None else None


def check_job_rules(it: Decided) -> Iterator[Issue]:
    """What SageMaker cannot do for the job, whatever account it runs in."""
    yield from job_issues(it.plan.job)


def check_decisions(it: Decided) -> Iterator[Issue]:
    """An account, an image or a time that cannot be decided."""
    yield from it.decisions.issues


def check_locations(it: Decided) -> Iterator[Issue]:
    """Regions, accounts and ARNs that do not fit one another."""
    if (settings := it.decisions.settings) is not None:
        yield from location_issues(it.plan.job, settings)


def check_account(it: Decided) -> Iterator[Issue]:
    """What the settings of the account rule out."""
    if (settings := it.decisions.settings) is not None:
        yield from account_issues(it.plan.job, settings, it.decisions.limit)


def check_unusable_settings(it: Decided) -> Iterator[Issue]:
    """Variables, tags and network ids that no training job can use."""
    if (settings := it.decisions.settings) is not None:
        yield from unusable_issues(it.plan.job, settings)


def check_request_limits(it: Decided) -> Iterator[Issue]:
    """What the service's own limits refuse of the request."""
    job, assumed = it.plan.job, it.decisions.assumed
    if assumed is not None:
        yield from request_issues(with_locations(job, assumed, _stand_in(job)))


def check_disk_and_time(it: Decided) -> Iterator[Issue]:
    """Disks and time limits that hold no single checkpoint."""
    yield from (*volume_issues(it.plan), *time_issues(it.plan))


def check_program(it: Decided) -> Iterator[Issue]:
    """The user's program: its entry, requirements and files."""
    if it.decisions.program is not None:
        from sm_llm.launcher.planning.program_checks import program_issues

        yield from program_issues(it.plan.job, it.decisions.program, it.image)


def check_job_use(it: Decided) -> Iterator[Issue]:
    """Instances, disks and limits that work, but are probably not meant."""
    yield from (*job_warnings(it.plan.job), *volume_warnings(it.plan), *time_warnings(it.plan))


def check_imports(it: Decided) -> Iterator[Issue]:
    """Modules that the image does not hold."""
    task, program = it.plan.job.task, it.decisions.program
    if program is not None and isinstance(task, ScriptTask):
        from sm_llm.launcher.planning.program_checks import module_warnings
        from sm_llm.launcher.planning.removed_modules import import_warnings

        yield from (*import_warnings(program.files, it.image, task.entry), *module_warnings(task.entry, program))


def check_network(it: Decided) -> Iterator[Issue]:
    """Packages that a private network does not reach."""
    settings, program = it.decisions.settings, it.decisions.program
    if settings is not None:
        has_requirements = program is not None and REQUIREMENTS in program.files
        yield from network_warnings(it.plan, settings, has_requirements=has_requirements)


def check_request_use(it: Decided) -> Iterator[Issue]:
    """What works in a request, but is probably not meant."""
    # Only of a request that can be sent: a warning about a stand-in would mislead.
    if it.decisions.target is not None:
        yield from _request_warnings(it.plan.job, it.decisions.target)


BACKEND_CHECKERS: tuple[Checker[Decided], ...] = (
    check_job_rules,
    check_decisions,
    check_locations,
    check_account,
    check_unusable_settings,
    check_disk_and_time,
    check_program,
    check_job_use,
    check_imports,
    check_network,
    check_request_use,
)
REQUEST_CHECKERS: tuple[Checker[Decided], ...] = (check_request_limits,)


def plan_checks(plan: Plan) -> Checks:
    """What is decided for the job's request, and every issue of it. Contacts nothing."""
    it = Decided(plan, decide(plan))
    found = run(BACKEND_CHECKERS, it)
    # The request repeats values that were refused above, under the same paths.
    found += at_new_paths(run(REQUEST_CHECKERS, it), found)
    settings = it.decisions.settings
    origins = settings.origins if settings is not None else {}
    return Checks(it.decisions.target, tuple(_with_origin(issue, origins) for issue in found))


def _with_origin(issue: Issue, origins: Mapping[str, str]) -> Issue:
    """An issue that names which file of the SDK's defaults its value is from, where it is from one."""
    origin = issue.origin or origins.get(issue.path) or origins.get(issue.path.rpartition(".")[2], "")
    return replace(issue, origin=origin)


def _stand_in(job: JobSpec) -> RunLocation:
    """The place of a run, with an id and a digest that only the launch knows."""
    run_id = f"{job.name}{_STAND_IN_RUN}"
    run_uri = f"{job.storage.rstrip('/')}/{run_id}"
    # 64 zeros: a SHA-256 of the bundle, whose digest is known only once it is packed.
    code = f"{job.storage.rstrip('/')}/bundles/{'0' * 64}/sourcedir.tar.gz"
    return RunLocation(run_id, run_uri, 1, code, f"{run_uri}/job/attempt-1/")


def _request_warnings(job: JobSpec, target: SageMakerTarget) -> Iterator[Issue]:
    kind = job.compute.instance_type
    if target.limit.max_run > QUOTA_SECONDS:
        message = (
            f"{duration(target.limit.max_run)} is more than the 5 days that an account has "
            "before it asks for more (Service Quotas: longest run time of a training job)"
        )
        yield warning("time-limit-above-quota", "backend.max_run_seconds", message)
    if kind not in known_values("TrainingInstanceType"):
        message = f"the installed botocore does not know {kind} for training jobs"
        yield warning("instance-type-unknown-to-botocore", "compute.instance_type", message)
    yield from address_warnings(job)
    yield from location_warnings(job, target.settings)
    yield from unusable_warnings(job, target.settings)
    if target.image is not None:
        yield from images.patch_warnings(target.image, datetime.now(UTC).date())
