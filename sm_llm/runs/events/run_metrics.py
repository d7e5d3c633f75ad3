"""Metrics of a run, derived from its events: one row per step, and a summary of where it stands."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import KINDS, event_files, newest_per_step, read_events, read_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

MetricRow = dict[str, Any]
"""``step`` and, where they exist for it, the fields of its step, throughput and validation events."""

_KINDS = ("step", "throughput", "validation")
_ENVELOPE = ("kind", "time", "attempt")
# What a row is known by: values that a program logs under these names do not replace them.
_KEYS = ("step", "attempt")
# A step's event and a validation's both have ``tokens``: those of the step keep the name.
_RENAMED = {("validation", "tokens"): "validation_tokens"}


def metric_rows(events_folder: Path) -> list[MetricRow]:
    """Rows by ascending step; loss and validation loss in nats per token, times in seconds, exact floats."""
    events = list(read_events(events_folder))
    rows: dict[int, MetricRow] = {}
    for kind in _KINDS:
        for event in newest_per_step(iter(events), kind):
            row = rows.setdefault(event["step"], {"step": event["step"], "attempt": event["attempt"]})
            row.update((_RENAMED.get((kind, it), it), value) for it, value in event.items() if it not in _ENVELOPE)
    for event in events:
        if event["kind"] == "logged":
            row = rows.setdefault(event["step"], {"step": event["step"], "attempt": event["attempt"]})
            row.update((name, value) for name, value in event["values"].items() if name not in _KEYS)
            row["attempt"] = max(row["attempt"], event["attempt"])
    return [rows[step] for step in sorted(rows)]


def own_names(rows: Iterable[MetricRow]) -> list[str]:
    """Names of values that a program has logged and that no event of ours has, in the order of their first rows."""
    ours = {*_KEYS, *_RENAMED.values(), *(it.name for kind in _KINDS for it in fields(KINDS[kind]))}
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in ours]


def to_json(row: MetricRow) -> MetricRow:
    """A row in JSON's terms: finite floats read back bit for bit; NaN and infinity, which JSON lacks, are text."""
    return {
        name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


@dataclass(frozen=True)
class Summary:
    """Where a run stands. ``eta_seconds`` is what is left at the smoothed throughput of the last windows."""

    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    phase: str | None = None
    """A phase other than training, with ``done`` of ``total`` ``unit``."""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    stopping: bool = False
    """Somebody has asked the newest attempt to stop."""
    alarm: str | None = None
    """Publication is late: the last published step, how long ago, and why. None once a checkpoint is published."""
    recovery: str | None = None
    """The newest recovery from a loss: how long it took, and its parts as far as they are known."""
    attention: str | None = None
    """The kernel that computes attention, as the newest attempt has found it."""
    start_up: str | None = None
    """The newest attempt's way to its first step: how long it took, and its phases."""


# Weight of the newest window in the seconds of a step that the time left is reckoned from.
_SMOOTHING = 0.3
# Windows that are not averaged.
_WARM = 2


class SummaryBuilder:
    """Folds events, in the order they were written, into a summary."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._step_seconds: float | None = None
        self._windows = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event into account; kinds without progress are ignored."""
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    def _on_attempt_started(self, event: Mapping[str, Any]) -> None:
        self._values.update(total_steps=event["total_steps"], phase=None, stopping=False, attention=None, start_up=None)
        self._step_seconds, self._windows = None, 0

    def _on_start_chosen(self, event: Mapping[str, Any]) -> None:
        self._values.update(step=event["step"])

    def _on_step(self, event: Mapping[str, Any]) -> None:
        self._values.update(step=event["step"], loss=event["loss"], phase=None)

    def _on_logged(self, event: Mapping[str, Any]) -> None:
        # A program logs what it likes; a value named loss is shown as the run's.
        self._values.update(step=event["step"], loss=event["values"].get("loss", self._values.get("loss")))

    def _on_throughput(self, event: Mapping[str, Any]) -> None:
        self._values.update(tokens_per_second=event["tokens_per_second"])
        before, now = self._step_seconds, event["step_seconds"]
        # The first window holds compilation and warm-up: the second replaces it, and later ones are averaged.
        self._step_seconds = now if before is None or self._windows < _WARM else before + _SMOOTHING * (now - before)
        self._windows += 1

    def _on_stop_requested(self, _: Mapping[str, Any]) -> None:
        self._values.update(stopping=True)

    def _on_validation(self, event: Mapping[str, Any]) -> None:
        self._values.update(validation_loss=event["validation_loss"])

    def _on_progress(self, event: Mapping[str, Any]) -> None:
        self._values.update({name: event[name] for name in ("phase", "done", "total", "unit")})

    def _on_publication_late(self, event: Mapping[str, Any]) -> None:
        self._values.update(alarm=event_line(event))

    def _on_recovered(self, event: Mapping[str, Any]) -> None:
        self._values.update(recovery=event_line(event))

    def _on_attention_chosen(self, event: Mapping[str, Any]) -> None:
        self._values.update(attention=event["attention"])

    def _on_start_measured(self, event: Mapping[str, Any]) -> None:
        self._values.update(start_up=event_line(event))

    def _on_checkpoint_published(self, _: Mapping[str, Any]) -> None:
        self._values.update(alarm=None)

    @property
    def summary(self) -> Summary:
        total, step = self._values.get("total_steps"), self._values.get("step", 0)
        eta = None if total is None or self._step_seconds is None else (total - step) * self._step_seconds
        return Summary(**self._values, eta_seconds=eta)


def summarise(events: Iterable[Mapping[str, Any]]) -> Summary:
    """The summary of events in the order they were written."""
    builder = SummaryBuilder()
    for event in events:
        builder.add(event)
    return builder.summary


# Some hundred events: enough for the newest step even where validations and notices lie between.
_GLANCE_BYTES = 65_536


def glance(events_folder: Path) -> Summary:
    """A summary from the two ends of the newest attempt's log: cheap, for a list of many runs."""
    # The files are ordered by attempt, so the last one is the newest.
    newest = [path for _, writer, path in event_files(events_folder) if writer == "rank0"][-1:]
    return summarise(event for path in newest for event in _ends(path))


def _ends(path: Path) -> Iterator[Mapping[str, Any]]:
    size = path.stat().st_size
    # The beginning has the number of steps and the start, the end has the newest step.
    for offset, event in read_file(path):
        yield event
        if offset >= _GLANCE_BYTES:
            break
    else:
        return
    # A line that this cuts in two cannot be read, and is skipped.
    yield from (event for _, event in read_file(path, max(offset, size - _GLANCE_BYTES)))
