"""Decides what a training job gets before its request is formatted: account, image, time, processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, PlanError
from sm_llm.launcher.backends.sagemaker.request.capacity import TimeLimit, time_limit
from sm_llm.launcher.backends.sagemaker.request.distribution import distribution
from sm_llm.launcher.backends.sagemaker.request.request import training_job
from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings, setting_issues, settings
from sm_llm.launcher.backends.sagemaker.request.target import SageMakerTarget
from sm_llm.launcher.bundle import local_source
from sm_llm.launcher.images import images
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.tasks import TASK_KINDS, ScriptTask, starts_ranks

if TYPE_CHECKING:
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec

_ANY_ROLE = "arn:aws:iam::123456789012:role/any"
_ANY_REGION = "us-east-1"
_MASTER_PORT = "7777"
"""The training toolkit's own."""


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
    image, address = _image(job, found.region or _ANY_REGION, issues)
    limit = time_limit(job, plan.total_flops)
    known = limit if isinstance(limit, TimeLimit) else None
    assumed = SageMakerTarget(
        settings=replace(found, role=found.role or _ANY_ROLE, region=found.region or _ANY_REGION),
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
    return Decisions(assumed if is_whole else None, assumed, found, known, program, tuple(issues))


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
    place = ("--master_addr", "algo-1", "--master_port", _MASTER_PORT, "--node_rank")
    return tuple((*first, *((*place, str(node)) if nodes > 1 else ()), program) for node in range(nodes))
