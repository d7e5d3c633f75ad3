"""Draws a run: loss with validation loss, learning rate, throughput, as one PNG."""

from __future__ import annotations

import itertools
import math
from io import BytesIO
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SmLlmError
from sm_llm.optional import missing
from sm_llm.runs.events.run_metrics import metric_rows
from sm_llm.storage.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sm_llm.runs.events.run_metrics import MetricRow

INK, MUTED, GRID = "#1f2430", "#8a93a6", "#e6e9ef"
BLUE, ORANGE, GREEN, VIOLET = "#2f6fde", "#e4572e", "#1f9d73", "#7d5bd0"
# Loss gets a logarithmic axis only where it spans so much; cross-entropy of a usual run does not.
_LOG_FROM_RATIO = 20.0


def plot_run(events_folder: Path, target: Path, *, title: str) -> Path:
    """Write the PNG of a run's events to ``target`` and return it. Raises ``SmLlmError`` without a step to draw."""
    rows = metric_rows(events_folder)
    if not any("loss" in row for row in rows):
        raise SmLlmError(f"{title}: no training step is recorded yet, so there is nothing to plot")
    figure = draw(rows, title)
    # Drawn in memory and written at once, so that a viewer that reloads the file never sees half an image.
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150, facecolor="white")
    write_atomically(target, image.getvalue())
    return target


def draw(rows: Sequence[MetricRow], title: str) -> Figure:
    """The figure: one large panel of losses, below it learning rate and throughput over the same steps."""
    if (lack := missing("matplotlib")) is not None:
        raise SmLlmError(f"a plot cannot be drawn: {lack}")
    from matplotlib.figure import Figure

    # A Figure without pyplot: no global state, no display, usable from any thread.
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    axes: dict[str, Axes] = figure.subplot_mosaic([["loss", "loss"], ["rate", "speed"]], height_ratios=[1.75, 1])
    # Without parse_math, because a dollar sign in a name starts no formula.
    figure.suptitle(title, parse_math=False, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    _draw_loss(axes["loss"], rows)
    _draw_rate(axes["rate"], rows)
    _draw_speed(axes["speed"], rows)
    for panel in axes.values():
        _style(panel, max(row["step"] for row in rows))
    return figure


def _series(rows: Sequence[MetricRow], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None and math.isfinite(row[name])]
    return [step for step, _ in points], [value for _, value in points]


def _continuations(rows: Sequence[MetricRow]) -> list[int]:
    """The first step of every later attempt."""
    pairs = itertools.pairwise(rows)
    return [after["step"] for before, after in pairs if after["attempt"] > before["attempt"]]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of ``window`` values around every point (fewer at the ends), so that the curve does not lag behind."""
    # Prefix sums make each mean one subtraction, whatever the window.
    sums = [0.0, *itertools.accumulate(values)]
    before, after = window // 2, window - window // 2
    bounds = [(max(0, index - before), min(len(values), index + after)) for index in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in bounds]


def _draw_loss(panel: Axes, rows: Sequence[MetricRow]) -> None:
    steps, losses = _series(rows, "loss")
    # About fifty independent means over the width of the panel.
    window = max(1, len(losses) // 50)
    panel.plot(steps, losses, color=BLUE, alpha=0.3 if window > 1 else 1.0, linewidth=1.0 if window > 1 else 1.6,
               label="training loss" if window == 1 else None)  # fmt: skip
    if window > 1:
        panel.plot(steps, smooth(losses, window), color=BLUE, linewidth=1.9, label=f"training loss (mean of {window})")
    validated, validation = _series(rows, "validation_loss")
    if validation:
        panel.plot(validated, validation, color=ORANGE, marker="o", markersize=4.5, label="validation loss")
        panel.annotate(f"{validation[-1]:.3f}", (validated[-1], validation[-1]), xytext=(0, 9),
                       textcoords="offset points", ha="right", color=ORANGE, fontsize=9.5)  # fmt: skip
    for step in _continuations(rows):
        panel.axvline(step, color=MUTED, linewidth=1, linestyle="--")
        panel.annotate("continued", (step, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -9),
                       textcoords="offset points", color=MUTED, fontsize=8.5)  # fmt: skip
    broken = [row["step"] for row in rows if row.get("loss") is not None and not math.isfinite(row["loss"])]
    # A run that diverged has a broken loss at every step from then on; the first hundred lines show where it began.
    for step in broken[:100]:
        panel.axvline(step, color=ORANGE, alpha=0.35, linewidth=1, linestyle=":")
    values = losses + validation
    if values and min(values) > 0 and max(values) / min(values) > _LOG_FROM_RATIO:
        panel.set_yscale("log")
    panel.set_ylabel("loss (nats per token)")
    panel.legend(frameon=False, fontsize=9.5, labelcolor=INK)


def _draw_rate(panel: Axes, rows: Sequence[MetricRow]) -> None:
    panel.plot(*_series(rows, "learning_rate"), color=VIOLET, linewidth=1.7)
    panel.set_ylabel("learning rate")
    panel.set_ylim(bottom=0)
    panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)


def _draw_speed(panel: Axes, rows: Sequence[MetricRow]) -> None:
    from matplotlib.ticker import EngFormatter

    steps, speeds = _series(rows, "tokens_per_second")
    panel.plot(steps, speeds, color=GREEN, linewidth=1.7, marker="o" if len(steps) < 3 else None)
    panel.set_ylabel("tokens per second")
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(EngFormatter(sep=""))


def _style(panel: Axes, last_step: int) -> None:
    from matplotlib.ticker import MaxNLocator

    panel.set_xlabel("step")
    # At least one step wide, and with room behind the last one.
    panel.set_xlim(0, max(1, last_step) * 1.01)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.grid(color=GRID, linewidth=0.9)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(MUTED)
    panel.tick_params(colors=MUTED, labelsize=9.5)
    _label: Any
    for _label in (panel.xaxis.label, panel.yaxis.label):
        _label.set_color(INK)
        _label.set_fontsize(10)
