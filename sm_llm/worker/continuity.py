"""Whether a checkpoint is continued as it began: the same order of data and the same course of the learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.errors import CheckpointError, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_UNBOUNDED = ("constant", "plateau")
"""Schedules that do not depend on how many steps there are."""
_DATA = {
    "global_batch_size": "task.global_batch_size",
    "seq_length": "task.data.seq_length",
    "rows": "task.data",
    "seed": "task.seed",
}


def check_continuation(
    before: Mapping[str, Any], now: Mapping[str, Any], step: int, *, schedule_is_stated: bool
) -> None:
    """Compare a run's fingerprint (``Setup.fingerprint``) in its checkpoint of ``step`` with what it is now.

    Raises ``CheckpointError``, all faults at once, if samples would be
    repeated or left out, or if the schedule has another length and nobody stated that it shall
    (``task.optim.schedule_steps``).
    """
    changed = {name: it for name, it in before.items() if name in now and now[name] != it}
    faults = [_data_fault(name, changed[name], now[name]) for name in _DATA if name in changed]
    if not schedule_is_stated and (fault := _schedule_fault(changed, now, step)) is not None:
        faults.append(fault)
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in faults)
        raise CheckpointError(f"the checkpoint of step {step} cannot be continued like this:\n{listed}")


def check_strategy(
    uri: str, meta: Mapping[str, Any], strategy: str, refusal: Callable[[Mapping[str, Any]], str | None]
) -> None:
    """Refuse a checkpoint (its commit's ``meta``) that this strategy cannot load, before anything is allocated.

    ``refusal`` is ``Strategy.refusal``. Raises ``CheckpointError``.
    """
    parallelism = (meta.get("layout") or {}).get("parallelism") or {}
    saved = parallelism.get("strategy", strategy)
    if saved != strategy:
        raise CheckpointError(
            f"{uri}: was saved by strategy {saved}, and {strategy} cannot read it. Continue with {saved}, or start a "
            "new run from a published model (start.pretrained)"
        )
    if reason := refusal(meta.get("job", {})):
        raise CheckpointError(f"{uri}: {reason}")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Every number of a job that is not as it was, as ``name: before -> now``."""
    return [f"{name}: {it} -> {now[name]}" for name, it in before.items() if name in now and now[name] != it]


def _data_fault(name: str, before: Any, now: Any) -> Fault:
    what = "the number of training rows" if name == "rows" else name
    problem = f"{what} was {before} when it was saved: samples would be repeated or left out"
    remedy = f"Set it to {before}" if name != "rows" else "Continue with the same rows"
    return Fault(_DATA[name], problem, now, f"{remedy}, or train on in a new run: sm-llm branch")


def _schedule_fault(changed: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Fault | None:
    if "schedule_steps" not in changed or (now["schedule"] in _UNBOUNDED and "warmup_steps" not in changed):
        return None
    before, after = changed["schedule_steps"], now["schedule_steps"]
    problem = f"the {now['schedule']} schedule spanned {before} steps and would now span {after}: the rate would jump"
    remedy = f"State task.optim.schedule_steps: {before} keeps its course after step {step}, {after} is the new one"
    return Fault("task.optim.schedule_steps", problem, remedy=remedy)
