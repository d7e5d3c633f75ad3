"""Which class trains which ``parallelism.strategy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.place import Place
    from sm_llm.worker.strategies.base import Strategy


def make_strategy(task: TrainTask, place: Place) -> Strategy:
    """The strategy of ``task.parallelism``; each is imported alone, because each lives in its own software stack."""
    if task.parallelism.strategy == "smp":
        from sm_llm.worker.strategies.smp.strategy import SmpStrategy

        return SmpStrategy(task, place)
    from sm_llm.worker.strategies.fsdp.strategy import FsdpStrategy

    return {"fsdp": FsdpStrategy}[task.parallelism.strategy](task, place)
