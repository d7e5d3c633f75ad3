"""The review of a plan for SageMaker: every fault of its request at once, what to warn of, and what to show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from sm_llm.contract.image_packages import REQUIREMENTS
from sm_llm.errors import Fault, PlanError
from sm_llm.launcher.backends.sagemaker.request.addresses import address_warnings
from sm_llm.launcher.backends.sagemaker.request.arns import place_faults, place_warnings
from sm_llm.launcher.backends.sagemaker.request.disk import network_warnings, volume_faults, volume_warnings
from sm_llm.launcher.backends.sagemaker.request.fields import request_faults
from sm_llm.launcher.backends.sagemaker.request.limits import known_values
from sm_llm.launcher.backends.sagemaker.request.request import Request, training_job
from sm_llm.launcher.backends.sagemaker.request.rules import account_faults, job_faults, job_warnings, model_faults
from sm_llm.launcher.backends.sagemaker.request.settings import Settings, setting_faults, settings
from sm_llm.launcher.backends.sagemaker.request.time_limit import (
    QUOTA_SECONDS,
    TimeLimit,
    time_faults,
    time_limit,
    time_warnings,
)
from sm_llm.launcher.backends.sagemaker.request.unusable import unusable_faults, unusable_warnings
from sm_llm.launcher.bundle import local_source
from sm_llm.launcher.display.lines import duration
from sm_llm.launcher.images import images
from sm_llm.launcher.planning.removed_modules import import_warnings
from sm_llm.launcher.planning.review import Review
from sm_llm.launcher.planning.source_faults import module_warnings, program_faults
from sm_llm.spec.backends import SageMakerBackend
from sm_llm.spec.tasks import ScriptTask
from sm_llm.spec.validation.check_compute import compute_faults

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec

_ANY_ROLE = "arn:aws:iam::123456789012:role/any"
_ANY_REGION = "us-east-1"
_STAND_IN_RUN = "-20000101-000000-0000"


@dataclass(frozen=True)
class Decided:
    """What a request takes from outside the job: account, image and time."""

    settings: Settings
    image_uri: str
    image: images.Image | None
    limit: TimeLimit


def decide(plan: Plan) -> tuple[Decided | None, Settings | None, TimeLimit | None, list[Fault]]:
    """The decisions, as far as they can be made, and every fault on the way. ``Decided`` is None with any of them."""
    try:
        found = settings(plan.job)
    except PlanError as error:
        return None, None, None, list(error.faults)
    faults = setting_faults(found)
    image, address = _image(plan.job, found.region or _ANY_REGION, faults)
    limit = time_limit(plan.job, plan.total_flops)
    if isinstance(limit, Fault):
        told = plan.total_flops is not None and any(compute_faults(plan.job))  # a known type would give the time
        return None, found, None, faults if told else [*faults, limit]
    if faults or address is None:
        return None, found, limit, faults
    return Decided(found, address, image, limit), found, limit, faults


def review(plan: Plan) -> Review:
    """Every fault, warning and fact of a job's request. Touches nothing in the cloud."""
    decided, found, limit, faults = decide(plan)
    if found is not None:
        faults += place_faults(plan.job, found)
        faults += account_faults(plan.job, found, limit)
        faults += unusable_faults(plan.job, found)
        faults += _request_faults(plan.job, decided or _assumed(found, limit), faults)
    faults += [*model_faults(plan), *volume_faults(plan), *time_faults(plan)]
    tree = local_source(plan.job.task.source) if isinstance(plan.job.task, ScriptTask) else None
    image = decided.image if decided else None
    faults += program_faults(plan.job, tree, image)
    warnings = [*job_warnings(plan.job), *volume_warnings(plan), *time_warnings(plan), *(tree.warnings if tree else [])]
    if tree is not None and isinstance(plan.job.task, ScriptTask):
        warnings += [*import_warnings(tree, image, plan.job.task.entry), *module_warnings(plan.job.task.entry, tree)]
    if found is not None:
        has_requirements = tree is not None and REQUIREMENTS in tree.files
        warnings += network_warnings(plan, found, has_requirements=has_requirements)
    facts: dict[str, str] = {}
    if decided is not None:
        warnings += _request_warnings(plan.job, decided)
        facts = _facts(plan.job, decided, tree)
    origins = found.origins if found is not None else {}
    return Review(tuple(_whence(fault, origins) for fault in faults), tuple(warnings), facts)


def _whence(fault: Fault, origins: Mapping[str, str]) -> Fault:
    """A fault that names which file of the SDK's defaults its value is from, where it is from one."""
    origin = fault.origin or origins.get(fault.path) or origins.get(fault.path.rpartition(".")[2], "")
    return replace(fault, origin=origin)


def _image(job: JobSpec, region: str, faults: list[Fault]) -> tuple[images.Image | None, str | None]:
    options = job.backend
    assert isinstance(options, SageMakerBackend)
    if options.image_uri is not None:
        return None, options.image_uri
    row = images.choose(job, options.image_version)
    address = row if isinstance(row, Fault) else images.uri(row, region)
    if isinstance(row, Fault) or isinstance(address, Fault):
        faults += [it for it in (row, address) if isinstance(it, Fault)][:1]
        return None, None
    return row, address


def _assumed(found: Settings, limit: TimeLimit | None) -> Decided:
    """Decisions in place of those that cannot be made, so that the rest of the request is checked all the same."""
    account = replace(found, role=found.role or _ANY_ROLE, region=found.region or _ANY_REGION)
    return Decided(account, "image", None, limit or TimeLimit(1, None, ""))


def _request_faults(job: JobSpec, decided: Decided, told: Sequence[Fault]) -> list[Fault]:
    """What the service's own limits refuse of the request, but for fields that are reported already."""
    kind = job.compute.instance_type or ""  # its absence is a fault that is reported
    shown = job.model_copy(update={"compute": job.compute.model_copy(update={"instance_type": kind})})
    request = training_job(shown, _stand_in(shown, decided))
    return list(request_faults(request, [*told, *job_faults(job)]))


def _stand_in(job: JobSpec, decided: Decided) -> Request:
    """A request as it will be, with a run id and a digest that only the launch knows."""
    run_id = f"{job.name}{_STAND_IN_RUN}"
    run_uri = f"{job.storage.rstrip('/')}/{run_id}"
    code = f"{job.storage.rstrip('/')}/bundles/{'0' * 64}/sourcedir.tar.gz"
    return Request(
        run_id, run_uri, 1, decided.image_uri, code, f"{run_uri}/job/attempt-1/", decided.settings, decided.limit
    )


def _request_warnings(job: JobSpec, decided: Decided) -> Iterator[str]:
    kind = job.compute.instance_type
    if decided.limit.max_run > QUOTA_SECONDS:
        yield (
            f"backend.max_run_seconds: {duration(decided.limit.max_run)} is more than the 5 days that an account has "
            "before it asks for more (Service Quotas: longest run time of a training job)"
        )
    if kind not in known_values("TrainingInstanceType"):
        yield f"compute.instance_type: the installed botocore does not know {kind} for training jobs"
    yield from address_warnings(job)
    yield from place_warnings(job, decided.settings)
    yield from unusable_warnings(job, decided.settings)
    today = datetime.now(UTC).date()
    if decided.image is not None and (warning := images.patch_warning(decided.image, today)):
        yield f"backend.image_version: {warning}"


def _image_facts(image: images.Image) -> dict[str, str]:
    facts = {"image note": image.note} if image.note else {}
    if image.patched_until is not None:
        facts["image patches"] = f"until {image.patched_until} (table of {images.TABLE_DATE})"
    return facts


def _facts(job: JobSpec, decided: Decided, tree: SourceTree | None) -> dict[str, str]:
    options, limit = job.backend, decided.limit
    assert isinstance(options, SageMakerBackend)
    wait = f", waiting included {duration(limit.max_wait)}" if limit.max_wait is not None else ""
    facts = {
        "image": decided.image_uri,
        "image mode": "stock (what it lacks is installed once per node)" if options.image == "stock" else "built",
        "time limit": f"{duration(limit.max_run)}{wait} ({limit.reason})",
        "role": str(decided.settings.role),
        "region": str(decided.settings.region),
    }
    if decided.image is not None:
        facts |= _image_facts(decided.image)
    if tree is not None:
        out = f", {len(tree.left_out)} entries left out" if tree.left_out else ""
        facts["program"] = f"{len(tree.files)} files, {tree.bytes / 1e6:.1f} MB{out}"
    for name, origin in decided.settings.origins.items():
        facts[f"{name} from"] = origin
    return facts
