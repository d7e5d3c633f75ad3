"""The Plan: one checked job with every number that follows from it, as a pure value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sm_llm.errors import PlanError
from sm_llm.launcher.planning.plan_settings import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.errors import Issue
    from sm_llm.launcher.planning.memory import MemoryEstimate
    from sm_llm.launcher.planning.model_facts import ModelFacts
    from sm_llm.spec.derive import Derived
    from sm_llm.spec.job import JobSpec


class Target(Protocol):
    """What a backend has decided for a plan, as typed values, once; each backend has a frozen dataclass of its own."""

    @property
    def command(self) -> tuple[tuple[str, ...], ...]:
        """The argument list of every node; ``<run>`` and ``<free-port>`` are filled in at launch."""

    @property
    def facts(self) -> Mapping[str, str]:
        """The decisions in words, in the order to show them: image, time limit, account, devices."""


@dataclass(frozen=True)
class Checks:
    """A backend's answer to one plan. ``target`` is None where an issue keeps it from being decided."""

    target: Target | None
    issues: tuple[Issue, ...] = ()
    """Errors and warnings."""
    unsupported: tuple[Issue, ...] = ()
    """Why a job that is right cannot run here as things stand: what is not installed on this machine."""


@dataclass(frozen=True)
class Plan:
    """One job, checked, with every number that follows from it. ``step`` is its name in a workflow."""

    job: JobSpec
    digest: str
    world_size: int
    target: Target | None = None
    """What the backend has decided; None only until it is asked, in its own ``plan_checks``."""
    derived: Derived | None = None
    model: ModelFacts | None = None
    rows: int | None = None
    """Training rows, where they exist already."""
    memory: MemoryEstimate | None = None
    """At the peak of a training, where the instance type has known GPUs."""
    issues: tuple[Issue, ...] = ()
    """Warnings; an error leaves no plan."""
    unsupported: tuple[Issue, ...] = ()
    """Why the job can be planned and rendered, but cannot run yet or here; every way of starting it refuses
    (``assert_supported``)."""
    step: str | None = None
    after: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The texts of ``issues``."""
        return tuple(map(str, self.issues))

    @property
    def command(self) -> tuple[tuple[str, ...], ...]:
        """The argument list of every node; ``<run>`` and ``<free-port>`` are filled in at launch."""
        return self.target.command if self.target is not None else ()

    @property
    def facts(self) -> Mapping[str, str]:
        """What the backend decided, in words: image, time limit, account."""
        return self.target.facts if self.target is not None else {}

    @property
    def total_flops(self) -> float | None:
        """FLOPs of the whole training, forward and backward."""
        tokens = self.derived.total_tokens if self.derived else None
        return None if self.model is None or tokens is None else self.model.flops_per_token * tokens

    @property
    def settings(self) -> dict[str, str]:
        """Data, start, tokenizer, precision and what is installed, in words."""
        return settings(self.job, self.rows)

    def start_lines(self) -> list[str]:
        """What to show where the job is started: its settings, and its warnings."""
        warnings = [f"  warning: {text}" for text in self.warnings]
        return [*(f"  {name:<10} {value}" for name, value in self.settings.items()), *warnings]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; the spec is in ``job``."""
        return {
            "name": self.job.name,
            "step": self.step,
            "after": list(self.after),
            "kind": self.job.task.kind,
            "backend": self.job.backend.name,
            "digest": self.digest,
            "world_size": self.world_size,
            "derived": None if self.derived is None else asdict(self.derived),
            "model": None if self.model is None else asdict(self.model),
            "rows": self.rows,
            "memory": None if self.memory is None else {**asdict(self.memory), "total": self.memory.total},
            "total_flops": self.total_flops,
            "command": [list(argv) for argv in self.command],
            "warnings": list(self.warnings),
            "issues": [issue.to_json() for issue in self.issues],
            "settings": self.settings,
            "facts": dict(self.facts),
            "job": self.job.model_dump(mode="json"),
            **({"unsupported": [it.to_json() for it in self.unsupported]} if self.unsupported else {}),
        }

    def summary(self) -> str:
        """One line for logs: name, model, batch and length."""
        parts = [f"{self.job.name}: {self.job.task.kind} on {self.world_size} process(es), {self.job.backend.name}"]
        if self.model is not None:
            parts.append(f"{self.model.model_type} with {self.model.parameters:,} parameters")
        if self.derived is not None:
            parts.append(f"{self.derived.total_steps or '?'} steps of {self.derived.tokens_per_step:,} tokens")
        return ", ".join(parts)


def assert_supported(plans: Sequence[Plan]) -> None:
    """Raise one ``PlanError`` with everything for which jobs cannot run yet or here.

    The gate of every way to start a job: launch, resume, estimators and pipelines.
    """
    if found := [issue for plan in plans for issue in plan.unsupported]:
        raise PlanError(found)
