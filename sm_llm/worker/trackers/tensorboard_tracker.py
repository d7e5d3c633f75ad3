"""TensorBoard: event files in one folder for all attempts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.tensorboard import SummaryWriter

from sm_llm.worker.trackers.experiment_trackers import numbers, shown_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sm_llm.spec.training import TensorBoardSpec
    from sm_llm.worker.context import WorkerContext

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Scalars by step. Where training goes back, TensorBoard drops the steps after (``purge_step``)."""

    def __init__(self, spec: TensorBoardSpec, context: WorkerContext) -> None:
        self.id = context.job.run_id
        self._folder = context.run.root / FOLDER if spec.folder is None else Path(spec.folder) / self.id
        self.uri: str | None = str(self._folder)
        self._continues = any(self._folder.glob("events.out.tfevents.*"))
        self._writer = self._open(None)
        if not self._continues:
            text = json.dumps(shown_spec(context), indent=4)
            # Four spaces make a block of code of it in TensorBoard's Markdown.
            self._writer.add_text("specification", f"    {text}".replace("\n", "\n    "))

    def _open(self, purge_step: int | None) -> Any:
        return SummaryWriter(str(self._folder), purge_step=purge_step)

    def refill(self, events: Sequence[Mapping[str, Any]]) -> None:
        """From the first step that the files lack a number of, all is written again, and what they had is forgotten."""
        held = self._held() if self._continues else {}
        lacking = (event for event in events for name in numbers(event) if event["step"] not in held.get(name, ()))
        first = next(lacking, None)
        if first is None:
            return
        self._writer.close()
        self._writer = self._open(first["step"])
        self._continues = True
        self._write([event for event in events if event["step"] >= first["step"]])

    def _held(self) -> dict[str, set[int]]:
        """Steps of every scalar in the folder, as TensorBoard would show them."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        shown = EventAccumulator(str(self._folder), size_guidance={"scalars": 0}).Reload()
        return {name: {it.step for it in shown.Scalars(name)} for name in shown.Tags()["scalars"]}

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["kind"] == "start_chosen":
                if self._continues:
                    self._writer.close()
                    # Steps that will be done again are dropped from what earlier attempts wrote.
                    self._writer = self._open(event["step"] + 1)
                self._continues = True
            self._write([event])
        # A process that is killed loses what is in the buffer.
        self._writer.flush()

    def _write(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            for name, value in numbers(event).items():
                self._writer.add_scalar(name, value, event["step"], walltime=event["time"])

    def close(self, *, completed: bool) -> None:
        self._writer.close()
