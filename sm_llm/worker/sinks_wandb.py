"""Weights & Biases: one run there for all attempts, under the run's own id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wandb

from sm_llm.worker.sinks import numbers, shown_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.spec.sinks import WandbSink
    from sm_llm.worker.context import WorkerContext

STEP = "step"


class Tracker:
    """Metrics over an axis ``step`` of their own: W&B's internal step only grows, and drops what comes again."""

    def __init__(self, spec: WandbSink, context: WorkerContext) -> None:
        self.id = context.job.trackers.get("wandb", context.job.run_id)
        self._run: Any = wandb.init(
            project=spec.project,
            entity=spec.entity,
            id=self.id,
            name=context.job.run_id,
            resume="allow",
            mode=spec.mode,
            dir=str(context.run.root),
            config=shown_spec(context),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self.uri: str | None = self._run.url or None

    def refill(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Nothing: W&B's own process sends what it has written to the disk, and a run offline cannot be asked."""

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if values := numbers(event):
                self._run.log({STEP: event["step"], **values})

    def close(self, *, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)
