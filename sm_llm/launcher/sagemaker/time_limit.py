"""How long a job may run: what the plan knows of its work, with room, or what the user says; never a silent day."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Fault
from sm_llm.spec.backends import SageMakerBackend
from sm_llm.spec.machines import machines, slowest_flops
from sm_llm.spec.tasks import RegisterTask

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec

LONGEST_SECONDS = 28 * 86_400
"""SageMaker ends every training job after 28 days."""
QUOTA_SECONDS = 5 * 86_400
"""What an account may ask for at most, until its quota is raised."""
_HOUR = 3600
_LOW_MFU = 0.20
"""A slow run still reaches this share of the peak (published anchors: 0.33 to 0.68 on A100 and H100)."""
_ROOM = 2.0
_START_SECONDS = 2 * _HOUR
"""For pulling the image, staging inputs, loading weights and publishing the result."""
_SPOT_WAIT_SECONDS = 86_400


@dataclass(frozen=True)
class TimeLimit:
    """``max_run`` and, for spot, ``max_wait`` in seconds; ``reason`` says where they come from."""

    max_run: int
    max_wait: int | None
    reason: str


def time_limit(job: JobSpec, total_flops: float | None) -> TimeLimit | Fault:
    """The limits of a job whose whole training is ``total_flops``; a fault where nobody knows."""
    options = job.backend
    assert isinstance(options, SageMakerBackend)
    seconds, reason = options.max_run_seconds, "backend.max_run_seconds"
    if seconds is None and isinstance(job.task, RegisterTask):
        seconds, reason = _HOUR, "one call, and room for the instance to start"
    elif seconds is None:
        peak = slowest_flops(job)
        if total_flops is None or peak is None:
            remedy = "Give the seconds after which the job is ended whatever it does, for example 86400"
            problem = "the plan cannot tell how long this takes, and the service's own default is one day"
            return Fault("backend.max_run_seconds", problem, None, remedy)
        seconds, reason = _derived(total_flops, peak, job.compute.world_size)
        if len(machines(job)) > 1:
            reason += "; FLOP/s of the slowest instance group"
    wait = options.max_wait_seconds
    if options.spot and wait is None:
        wait = min(LONGEST_SECONDS, seconds + _SPOT_WAIT_SECONDS)
    return TimeLimit(seconds, wait, reason)


def _derived(total_flops: float, peak: float, devices: int) -> tuple[int, str]:
    work = total_flops / (devices * peak * _LOW_MFU)
    seconds = min(LONGEST_SECONDS, math.ceil((_START_SECONDS + _ROOM * work) / _HOUR) * _HOUR)
    reason = (
        f"{total_flops:.3g} FLOP / ({devices} x {peak:.3g} FLOP/s x {_LOW_MFU:.0%} MFU) = {work / _HOUR:.1f} h; "
        f"x {_ROOM:g} + {_START_SECONDS // _HOUR} h, in whole hours, at most 28 days"
    )
    return seconds, reason
