"""Disk and time of a job: what it needs, compared with what its machines and its account give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.launcher.images.images import packages_of, stack_of
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.job_machines import groups, machines, slowest_flops
from sm_llm.spec.tasks import RegisterTask, TrainTask
from sm_llm.spec.training import PretrainedStart
from sm_llm.terminal import counted, duration, quoted, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backends.sagemaker.request.settings import JobSettings
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.spec.job import JobSpec


_GB = 10**9
# Saves that a node holds at most: one is written, one waits, one is published (docs/publication.md).
_SAVES = 3
# The final model and the weights to start from are counted in fp32, the largest form that they are written in.
_FP32 = 4
# For packages, caches and logs.
_OTHER_GB = 10
# The SDK's own default size: types with NVMe disks use those for /opt/ml, so a larger volume would hold nothing.
_NVME_VOLUME_GB = 30
_EBS_VOLUME_GB = 100


def held_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes on the disk of the fullest node: with one save and with as many as there can be. 0 where nobody knows.

    Node 0 also writes the final model, every node reads the weights to start from.
    """
    task = plan.job.task
    if plan.model is None or not isinstance(task, TrainTask):
        return 0, 0
    weights = plan.model.parameters * _FP32
    # A checkpoint is sharded: every node writes an equal part of it.
    share = plan.model.checkpoint_bytes // plan.job.compute.instance_count
    start = weights if isinstance(task.start, PretrainedStart) else 0
    # At the least a save and the final model lie there one after the other; at the most all saves and the model at
    # once.
    return max(share, weights) + start, _SAVES * share + weights + start


def volume_issues(plan: Plan) -> Iterator[Issue]:
    """A disk on which not even one save fits."""
    least, most = held_bytes(plan)
    path, held = _disk(plan)
    if least > held:
        problem = f"the disk does not hold one checkpoint or the final model: a node writes {size(least)}"
        seen = f"{held // _GB} GB"
        yield Issue("volume-too-small", path, problem, seen, _remedy(path, most))


def volume_warnings(plan: Plan) -> Iterator[Issue]:
    """A disk that may become full while the store is slow."""
    least, most = held_bytes(plan)
    path, held = _disk(plan)
    if least <= held < most:
        message = (
            f"a node holds up to {_SAVES} checkpoints and the final model, {size(most)}; its disk has "
            f"{held // _GB:,} GB"
        )
        yield warning("volume-full-with-slow-storage", path, message, remedy=_remedy(path, most))


def _disk(plan: Plan) -> tuple[str, float]:
    """The field that decides how large the smallest disk of a node is, and its bytes; endless for an unknown type."""
    path = "backend.instance_groups" if groups(plan.job) else "compute.instance_type"
    own, volume = (path, float("inf")), ("backend.volume_size_gb", volume_size_gb(plan.job) * _GB)
    disks = [(path, row.nvme_gb * _GB) if row.nvme_gb else volume for row in machines(plan.job)]
    return min([own, *disks], key=lambda disk: disk[1])


def _remedy(path: str, most: int) -> str:
    needed = -(-most // _GB) + _OTHER_GB
    own = path == "backend.volume_size_gb"
    return f"Use at least {needed}" if own else f"Use more nodes, or a type with {needed:,} GB"


def network_warnings(plan: Plan, found: JobSettings, *, has_requirements: bool) -> Iterator[Issue]:
    """Packages that a job in a private network could not get."""
    options = SageMakerOptions.of(plan.job)
    # Without subnets of the user's the containers reach the internet through SageMaker's own network.
    if not found.subnets or options.wheelhouse is not None:
        return
    stack = stack_of(plan.job)
    count = len(packages_of(stack)) if options.image == "stock" else 0
    wanted = [f"{counted(count, 'package')} that the image lacks"] if count else []
    wanted += ["the program's requirements.txt"] if has_requirements else []
    if wanted:
        message = (
            f"every node installs {' and '.join(wanted)} from the package index, which a private network without a "
            "NAT gateway does not reach"
        )
        remedy = (
            f"Two ways out: backend.wheelhouse (sm-llm image wheelhouse {quoted(stack)} s3://bucket/wheels fills one), "
            "or an image that has them (sm-llm image build; backend.image=built)"
        )
        yield warning("packages-out-of-reach", "backend.vpc", message, remedy=remedy)


def volume_size_gb(job: JobSpec) -> int:
    """Size of the storage volume; types with NVMe disks use those, whatever is asked for."""
    options = SageMakerOptions.of(job)
    rows = machines(job)
    has_disks = bool(rows) and all(row.nvme_gb for row in rows)
    return options.volume_size_gb or (_NVME_VOLUME_GB if has_disks else _EBS_VOLUME_GB)


LONGEST_SECONDS = 28 * 86_400
"""SageMaker ends every training job after 28 days."""
QUOTA_SECONDS = 5 * 86_400
"""What an account may ask for at most, until its quota is raised."""
_HOUR = 3600
# A slow run still reaches this share of the peak (published anchors: 0.33 to 0.68 on A100 and H100).
_LOW_MFU = 0.20
# Twice the time of a slow run: a limit that is never reached costs nothing, one that is too short ends the job.
_ROOM = 2.0
# For pulling the image, staging inputs, loading weights and publishing the result.
_START_SECONDS = 2 * _HOUR
# A day of waiting for spot capacity, on top of the work.
_SPOT_WAIT_SECONDS = 86_400


@dataclass(frozen=True)
class TimeLimit:
    """``max_run`` and, for spot, ``max_wait`` in seconds; ``reason`` names where they come from."""

    max_run: int
    max_wait: int | None
    reason: str


def time_limit(job: JobSpec, total_flops: float | None) -> TimeLimit | Issue:
    """The limits of a job whose whole training is ``total_flops``; an issue where nobody knows."""
    options = SageMakerOptions.of(job)
    seconds, reason = options.max_run_seconds, "backend.max_run_seconds"
    if seconds is None and isinstance(job.task, RegisterTask):
        seconds, reason = _HOUR, "one call, and time for the instance to start"
    elif seconds is None:
        peak = slowest_flops(job)
        if total_flops is None or peak is None:
            remedy = "Give the seconds after which the job is ended whatever it does, for example 86400"
            # No guess: the service's default of one day would end a long training without a word.
            problem = "the plan does not know how long this takes, and the service's own default is one day"
            # The time of a training follows from what is wrong with it, and from machines that are not known.
            known = ("compute.instance_type", "backend.instance_groups") if total_flops is not None else ()
            follows = ("task",) if isinstance(job.task, TrainTask) and total_flops is None else known
            return Issue("time-limit-unknown", "backend.max_run_seconds", problem, remedy=remedy, blocked_by=follows)
        seconds, reason = _derived(total_flops, peak, job.compute.world_size)
        if len(machines(job)) > 1:
            reason += "; FLOP/s of the slowest instance group"
    wait = options.max_wait_seconds
    if options.spot and wait is None:
        # The 28 days bound waiting and running together.
        wait = min(LONGEST_SECONDS, seconds + _SPOT_WAIT_SECONDS)
    return TimeLimit(seconds, wait, reason)


def time_issues(plan: Plan) -> Iterator[Issue]:
    """A stated limit in which no training can save one step, even on hardware at its peak."""
    options, task = SageMakerOptions.of(plan.job), plan.job.task
    limit, until_stop = options.max_run_seconds, options.seconds_until_stop
    if limit is None or until_stop is None or not isinstance(task, TrainTask):
        return
    # Half of the limit is the least that seconds_until_stop leaves to the work, and the other half must hold a save.
    path, least = "backend.max_run_seconds", math.ceil(2 * options.stop_seconds)
    step, publishing = _step_seconds(plan), _publish_seconds(plan)
    if limit < least:
        problem = f"leaves {limit - until_stop:g} s to save a checkpoint, which takes up to {options.stop_seconds:g} s"
        yield Issue(
            "time-limit-too-short-to-save",
            path,
            problem,
            limit,
            f"Use at least {least}; loading image, data and weights takes minutes more",
        )
    elif step is not None and step + publishing > limit:
        problem = (
            f"ends before one step is saved: at the hardware's peak a step takes {step:,.0f} s, and publishing its "
            f"checkpoint {publishing:,.0f} s"
        )
        needed = math.ceil(step + publishing) + _START_SECONDS
        yield Issue(
            "time-limit-too-short-for-a-step",
            path,
            problem,
            limit,
            f"Use at least {needed}, leave it out, or use more nodes",
        )


def time_warnings(plan: Plan) -> Iterator[Issue]:
    """A stated limit that ends the job before its training can be done, even on hardware at its peak."""
    options = SageMakerOptions.of(plan.job)
    limit, step, derived = options.max_run_seconds, _step_seconds(plan), plan.derived
    if limit is None or step is None or derived is None or derived.total_steps is None:
        return
    whole = step * derived.total_steps
    if whole > limit:
        message = (
            f"the job ends after {duration(limit)}; its {counted(derived.total_steps, 'step')} take "
            f"{duration(whole)} at the hardware's peak, and more in practice"
        )
        remedy = "The same command continues it"
        yield warning("time-limit-below-training", "backend.max_run_seconds", message, remedy=remedy)


def _step_seconds(plan: Plan) -> float | None:
    """Seconds of a step with every accelerator at its peak; None where a number is not known."""
    peak = slowest_flops(plan.job)
    if plan.model is None or plan.derived is None or peak is None:
        return None
    return plan.model.flops_per_token * plan.derived.tokens_per_step / (plan.world_size * peak)


def _publish_seconds(plan: Plan) -> float:
    """Seconds in which all nodes publish a checkpoint over the whole of their network; 0 where it is not known."""
    rows = machines(plan.job)
    if plan.model is None or not rows:
        return 0.0
    # The slowest node decides: a checkpoint is published when the last part of it is.
    rate = min(row.network_gbps for row in rows) * 1e9 / 8
    return plan.model.checkpoint_bytes / (plan.job.compute.instance_count * rate)


def _derived(total_flops: float, peak: float, devices: int) -> tuple[int, str]:
    work = total_flops / (devices * peak * _LOW_MFU)
    # Whole hours: the number stays the same over small changes of a specification, and so does the request.
    seconds = min(LONGEST_SECONDS, math.ceil((_START_SECONDS + _ROOM * work) / _HOUR) * _HOUR)
    reason = (
        f"{total_flops:.3g} FLOP / ({devices} x {peak:.3g} FLOP/s x {_LOW_MFU:.0%} MFU) = {work / _HOUR:.1f} h; "
        f"x {_ROOM:g} + {_START_SECONDS // _HOUR} h, in whole hours, at most 28 days"
    )
    return seconds, reason
