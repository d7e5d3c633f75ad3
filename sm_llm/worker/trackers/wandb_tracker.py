"""Weights & Biases: one run there for all attempts, under the run's own id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import wandb

from sm_llm.worker.trackers.experiment_trackers import numbers, shown_names, shown_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.spec.training import WandbSpec
    from sm_llm.worker.context import WorkerContext

STEP = "step"


class WandbTracker:
    """Metrics over an axis ``step`` of their own: W&B's internal step only grows, and drops what comes again."""

    def __init__(self, spec: WandbSpec, context: WorkerContext) -> None:
        self._notice = context.notice
        # The id of the first attempt, under which resume="allow" continues the same run.
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
            # A resumed run may have another specification, which W&B would refuse as a changed config.
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        # See the class: charts use this axis in place of W&B's internal step.
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self.uri: str | None = self._run.url or None

    def refill(self, events: Sequence[Mapping[str, Any]]) -> None:
        """What the server has no number of is logged now; a run offline has no server that could be asked."""
        lacking = "wandb may lack steps of earlier attempts, which are in the run's own events"
        if self._run.offline:
            self._notice(f"{lacking}: it is offline, so what it has is unknown", "warning")
            return
        try:
            held = self._held()
        except Exception as error:  # of the library or the network: new numbers are taken all the same
            self._notice(f"{lacking}: its server could not be asked ({type(error).__name__}: {error})", "warning")
            return
        for event in events:
            values = {name: it for name, it in numbers(event).items() if event[STEP] not in held[name]}
            if values:
                self._run.log({STEP: event[STEP], **values})

    def _held(self) -> dict[str, set[int]]:
        """Steps of every number that the server has of earlier attempts."""
        known = wandb.Api().run(self._run.path)
        scans = {name: known.scan_history(keys=[STEP, name], use_cache=False) for name in shown_names()}
        return {name: {int(row[STEP]) for row in rows} for name, rows in scans.items()}

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if values := numbers(event):
                self._run.log({STEP: event["step"], **values})

    def close(self, *, completed: bool) -> None:
        # W&B shows a run with another code than 0 as failed, also one that continues later.
        self._run.finish(exit_code=0 if completed else 1)
