"""Settings that a job does not read because of another one: they would have no effect, and nothing would say so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sm_llm.errors import warning
from sm_llm.spec.tasks import PrepareTask, TrainTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sm_llm.errors import Issue
    from sm_llm.launcher.planning.draft import Draft
    from sm_llm.spec.derive import Derived

_SAVED = "weights are saved in the format that they are trained in (task.precision.master)"
_Reads = Callable[[TrainTask, "Derived | None"], bool]

OF_TRAININGS: dict[str, tuple[_Reads, str]] = {
    "logging.sample_prompt": (lambda task, _: task.tokenizer is not None, "a sample needs task.tokenizer"),
    "logging.sample_tokens": (
        lambda task, _: task.logging.sample_prompt is not None,
        "it is for task.logging.sample_prompt",
    ),
    "logging.profile.every_steps": (
        lambda task, derived: (
            task.logging.profile is None or not _is_after_the_end(task.logging.profile.every_steps, derived)
        ),
        "the training ends before the first trace",
    ),
    "validation.max_rows": (lambda task, _: has_validation(task), "task.data names no validation rows"),
    "checkpoint.keep_every_steps": (
        lambda task, derived: _keeps_one(task, derived),
        "no checkpoint is saved at such a step; use a multiple of task.checkpoint.every_steps",
    ),
    "watchdog.stall_factor": (lambda task, _: task.watchdog.enabled, "task.watchdog.enabled is false"),
    "watchdog.stall_seconds": (lambda task, _: task.watchdog.enabled, "task.watchdog.enabled is false"),
    "watchdog.start_seconds": (lambda task, _: task.watchdog.enabled, "task.watchdog.enabled is false"),
    "not_finite.limit": (
        lambda task, _: task.not_finite.policy != "stop",
        "it is for task.not_finite.policy skip and rollback",
    ),
    "optim.decay_embeddings": (lambda task, _: task.optim.weight_decay > 0, "task.optim.weight_decay is 0"),
    "optim.schedule_steps": (
        lambda task, _: task.optim.schedule not in ("constant", "plateau") or bool(task.optim.warmup_fraction),
        "the schedule spans no number of steps",
    ),
    "parallelism.sequence_parallel": (
        lambda task, _: task.parallelism.degrees.tensor > 1,
        "it is for a tensor_parallel_degree above 1",
    ),
    "parallelism.reshard_after_forward": (
        lambda task, _: getattr(task.parallelism, "sharding", "full") != "none",
        "with task.parallelism.sharding none no parameters are gathered",
    ),
    "model.config.dtype": (lambda *_: False, _SAVED),
    "model.config.torch_dtype": (lambda *_: False, _SAVED),
}
"""Path below the task -> whether the training reads it, and why not where it does not."""

OF_PREPARATIONS: dict[str, tuple[Callable[[PrepareTask], bool], str]] = {
    "seed": (lambda task: task.validation_fraction > 0, "it chooses what task.validation_fraction holds out"),
}


def check_unread_settings(draft: Draft) -> Iterator[Issue]:
    """Settings that differ from their defaults, and that nothing reads."""
    task = draft.job.task
    derived = draft.derived.value
    if isinstance(task, TrainTask):
        given = {path: why for path, (reads, why) in OF_TRAININGS.items() if not reads(task, derived)}
        if task.optim.schedule == "plateau" and not has_validation(task):
            message = "the rate never falls: it follows validation loss, and task.data names no validation rows"
            yield warning("plateau-without-validation", "task.optim.schedule", message)
    elif isinstance(task, PrepareTask):
        given = {path: why for path, (reads, why) in OF_PREPARATIONS.items() if not reads(task)}
    else:
        return
    for path, why in given.items():
        if (value := _changed(task, path.split("."))) is not None:
            yield warning("setting-without-effect", f"task.{path}", f"has no effect: {why}", value)
    if "OMP_NUM_THREADS" in draft.job.environment and getattr(draft.job.backend, "threads_per_process", None):
        message = "has no effect: environment.OMP_NUM_THREADS is given, which counts"
        yield warning("setting-without-effect", "backend.threads_per_process", message)


def _changed(holder: Any, path: list[str]) -> Any:
    """The value at a path, if the path is there and the value is not its default."""
    for name in path[:-1]:
        holder = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
    if isinstance(holder, dict):
        return holder.get(path[-1])
    fields: Mapping[str, Any] = getattr(type(holder), "model_fields", {})
    if path[-1] not in fields:
        return None
    value = getattr(holder, path[-1])
    return None if value == fields[path[-1]].get_default(call_default_factory=True) else value


def has_validation(task: TrainTask) -> bool:
    """Whether the data of a task has rows to validate on."""
    data = task.data
    if data.format == "synthetic":
        return data.validation_rows > 0
    return (data.validation_split if data.format == "stream" else data.validation) is not None


def _is_after_the_end(step: int, derived: Derived | None) -> bool:
    return derived is not None and derived.total_steps is not None and step > derived.total_steps


def _keeps_one(task: TrainTask, derived: Derived | None) -> bool:
    """Whether a save, at an interval or at the end, falls on a step that is kept."""
    kept = task.checkpoint.keep_every_steps
    if kept is None or derived is None or derived.total_steps is None or derived.checkpoint_every is None:
        return True
    total = derived.total_steps
    return total % kept == 0 or math.lcm(kept, derived.checkpoint_every) <= total
