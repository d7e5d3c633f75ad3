"""What a launch can really run: task kinds and strategies whose worker exists. Others are planned and shown only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Fault, SpecError
from sm_llm.spec.tasks import parallelism_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.launcher.plan import Plan

TASKS = ("train", "prepare", "fetch", "register", "script")
STRATEGIES = ("fsdp", "smp")
"""Of our own training; a script brings its own and may ask for the image and parameters of any."""


def assert_runnable(plans: Sequence[Plan]) -> None:
    """Raise one ``SpecError`` for everything that has no worker in this version. Nothing was uploaded or written."""
    faults = [fault for plan in plans for fault in _faults(plan)]
    if faults:
        raise SpecError(faults)


def _faults(plan: Plan) -> Iterator[Fault]:
    task = plan.job.task
    prefix = f"steps.{plan.step}." if plan.step else ""
    remedy = "This version plans and renders it (sm-llm plan, sm-llm fit --dry-run), but cannot run it"
    if task.kind not in TASKS:
        yield Fault(f"{prefix}task.kind", f"there is no worker for {task.kind} tasks yet", task.kind, remedy)
        return
    strategy = parallelism.strategy if (parallelism := parallelism_of(task)) else None
    if task.kind == "train" and strategy not in STRATEGIES:
        path = f"{prefix}task.parallelism.strategy"
        yield Fault(path, f"there is no worker for the strategy {strategy} yet", strategy, remedy)
