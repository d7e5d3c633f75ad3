"""What a node of a job keeps on its disk, and what it installs: compared with the volume and the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue, warning
from sm_llm.launcher.backends.sagemaker.request.request import volume_size_gb
from sm_llm.launcher.display.lines import size
from sm_llm.launcher.images.images import line_of
from sm_llm.launcher.images.locks import packages_of
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.machines.gpus import groups, machines
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.training import PretrainedStart
from sm_llm.terminal import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.backends.sagemaker.request.settings import Settings
    from sm_llm.launcher.planning.plan import Plan

_GB = 10**9
_SAVES = 3
"""Saves that a node holds at most: one is written, one waits, one is published (docs/publication.md)."""
_FP32 = 4
_OTHER_GB = 10
"""For packages, caches and logs."""


def held_bytes(plan: Plan) -> tuple[int, int]:
    """Bytes on the disk of the fullest node: with one save and with as many as there can be. 0 where nobody knows.

    Node 0 also writes the final model, every node reads the weights to start from.
    """
    task = plan.job.task
    if plan.model is None or not isinstance(task, TrainTask):
        return 0, 0
    weights = plan.model.parameters * _FP32
    share = plan.model.checkpoint_bytes // plan.job.compute.instance_count
    start = weights if isinstance(task.start, PretrainedStart) else 0
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


def network_warnings(plan: Plan, found: Settings, *, has_requirements: bool) -> Iterator[Issue]:
    """Packages that a job in a private network could not get."""
    options = SageMakerOptions.of(plan.job)
    if not found.subnets or options.wheelhouse is not None:
        return
    line = line_of(plan.job)
    count = len(packages_of(line)) if options.image == "stock" else 0
    wanted = [f"{count} packages that the image lacks"] if count else []
    wanted += ["the program's requirements.txt"] if has_requirements else []
    if wanted:
        message = (
            f"every node installs {' and '.join(wanted)} from the package index, which a private network without a "
            "NAT gateway does not reach"
        )
        remedy = (
            f"Two ways out: backend.wheelhouse (sm-llm image wheelhouse {quoted(line)} s3://bucket/wheels fills one), "
            "or an image that has them (sm-llm image build; backend.image=built)"
        )
        yield warning("packages-out-of-reach", "backend.vpc", message, remedy=remedy)
