"""What a launch can really run: task kinds and strategies whose worker exists, with the packages it needs here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import Issue, SpecError, SubmitError
from sm_llm.optional import missing
from sm_llm.spec.tasks import parallelism_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sm_llm.launcher.planning.plan import Plan

TASKS = ("train", "prepare", "fetch", "register", "script")
STRATEGIES = ("fsdp", "smp")
"""Of our own training; a script brings its own and may ask for the image and parameters of any."""
_PACKAGES = {"train": ("transformers", "tokenizers", "safetensors"), "prepare": ("tokenizers",)}
"""Kind of task -> what its worker imports, beside torch, which starts all of them."""


def assert_runnable(plans: Sequence[Plan]) -> None:
    """Raise one ``SpecError`` for everything that has no worker in this version. Nothing was uploaded or written.

    Raises ``SubmitError`` where workers that would run in this very environment lack packages.
    """
    issues = [issue for plan in plans for issue in _issues(plan)]
    if issues:
        raise SpecError(issues)
    kinds = [plan.job.task.kind for plan in plans if plan.job.backend.runs_here]
    needed = dict.fromkeys(module for kind in kinds for module in ("torch", *_PACKAGES.get(kind, ())))
    if (lack := missing(*needed)) is not None:
        raise SubmitError(f"a local run cannot start: {lack}")


def _issues(plan: Plan) -> Iterator[Issue]:
    task = plan.job.task
    prefix = f"steps.{plan.step}." if plan.step else ""
    remedy = "This version plans and renders it (the verb plan, and fit with --dry-run), but cannot run it"
    if task.kind not in TASKS:
        yield Issue(
            "task-kind-without-worker",
            f"{prefix}task.kind",
            f"there is no worker for {task.kind} tasks yet",
            task.kind,
            remedy,
        )
        return
    strategy = parallelism.strategy if (parallelism := parallelism_of(task)) else None
    if task.kind == "train" and strategy not in STRATEGIES:
        path = f"{prefix}task.parallelism.strategy"
        yield Issue(
            "strategy-without-worker", path, f"there is no worker for the strategy {strategy} yet", strategy, remedy
        )
