"""Shows a run while it lasts: one live line in a terminal, plain lines where the output is piped."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from sm_llm.errors import SmLlmError, StorageError, SubmitError
from sm_llm.launcher.display.formatting import training_line
from sm_llm.launcher.observe.follow import follow
from sm_llm.launcher.observe.status import status_of
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.run_metrics import SummaryBuilder
from sm_llm.terminal import big, duration, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.runs.events.run_metrics import Summary
    from sm_llm.runs.run_states import RunState

_BAR_WIDTH = 28
_SHORTEST_BAR = 8
# Without a terminal, a long phase logs its progress at every quarter.
_PLAIN_PROGRESS_STEP = 0.25


class Display:
    """Turns the events of one job into output on ``console``."""

    def __init__(self, console: Console, live: Live | None, label: str) -> None:
        self._console = console
        self._live = live
        self._label = label
        self._builder = SummaryBuilder()
        self._step: Mapping[str, Any] = {}
        self._printed: tuple[str, float] = ("", 0.0)

    def show(self, event: Mapping[str, Any], *, silently: bool = False) -> None:
        """Print what is worth a line (unless ``silently``) and move the live line."""
        self._builder.add(event)
        # Kept for the throughput event that follows it: together they are one training line.
        if event["kind"] == "step":
            self._step = event
        elif silently:
            pass
        elif event["kind"] == "throughput" and self._live is None and self._step:
            summary = self._builder.summary
            self._print(training_line(self._step, event, summary.total_steps, summary.eta_seconds))
        elif event["kind"] == "progress" and self._live is None:
            self._print_progress(event)
        elif line := event_line(event):
            self._print(line, warn=event.get("level", "info") != "info")
        if self._live is not None:
            self._live.update(live_text(self._label, self._builder.summary, self._console.width))

    def _print(self, line: str, *, warn: bool = False) -> None:
        from rich.text import Text

        text = Text.assemble((f"{self._label}  ", "dim"), (line, "yellow" if warn else ""))
        # soft_wrap keeps a line whole, to be copied and searched for.
        self._console.print(text, soft_wrap=True)

    def _print_progress(self, event: Mapping[str, Any]) -> None:
        phase, done, total = event["phase"], event["done"], event["total"]
        share = done / total if total else 0.0
        if phase != self._printed[0] or share >= self._printed[1] + _PLAIN_PROGRESS_STEP:
            self._printed = (phase, share)
            self._print(f"{phase} {share:.0%}" if total else f"{phase} {big(done)} {event['unit']}".rstrip())


def live_text(label: str, summary: Summary, width: int) -> Text:
    """The live line: a bar, then step, loss, validation loss, speed and what is left; one line of ``width`` at most.

    Where that is too long the bar gets shorter, then validation loss and speed are left out.
    """
    from rich.text import Text

    # A phase in the midst of training does not replace the line of the step.
    if summary.phase is not None and not summary.step:
        amount = f"{big(summary.done or 0)}{'/' + big(summary.total) if summary.total else ''} {summary.unit}".rstrip()
        text = f" {summary.phase}  {amount}"
        room = _room(width, label, text)
        return _one_line(Text.assemble((f"{label} ", "bold"), bar(summary.done, summary.total, room), text), width)
    parts = {"step": f"step {summary.step}/{summary.total_steps or '?'}"}
    if summary.loss is not None:
        parts["loss"] = f"loss {summary.loss:.4f}"
    if summary.validation_loss is not None:
        parts["validation loss"] = f"val {summary.validation_loss:.4f}"
    if summary.tokens_per_second is not None:
        parts["speed"] = f"{summary.tokens_per_second:,.0f} tok/s"
    if summary.eta_seconds is not None:
        parts["left"] = f"{duration(summary.eta_seconds)} left"
    for name in ("validation loss", "speed"):
        if _room(width, label, _joined(parts)) < _SHORTEST_BAR:
            parts.pop(name, None)
    text = _joined(parts)
    shown = bar(summary.step, summary.total_steps, _room(width, label, text))
    return _one_line(Text.assemble((f"{label} ", "bold"), shown, text), width)


def _joined(parts: Mapping[str, str]) -> str:
    return "  " + "  ".join(parts.values())


def _room(width: int, label: str, text: str) -> int:
    """Characters that are left for the bar."""
    return max(0, min(_BAR_WIDTH, width - len(label) - 1 - len(text)))


def _one_line(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def bar(done: float | None, total: float | None, width: int) -> Text:
    """A bar of ``width`` characters, filled to done/total."""
    from rich.text import Text

    share = min(1.0, (done or 0) / total) if total else 0.0
    filled = round(share * width)
    return Text.assemble(("━" * filled, "green"), ("━" * (width - filled), "grey35"))


def accompany(run: RunHandle, console: Console, *, wait: bool, since: float | None = None) -> RunState:
    """Print how ``run`` began, show it until it ends (unless ``wait`` is false) and print how it ended.

    Ctrl-C asks the run to stop, and a second one kills it; either way its end is waited for.
    """
    begin(run, console)
    if wait:
        with _counted_interrupts() as interrupts:
            watch(run, console, interrupts, since=since)
        _close(run, console)
    return run.state


def follow_live(run: RunHandle, console: Console) -> RunState | None:
    """Show from now on a run that somebody else started. Ctrl-C only ends the display; then the result is None."""
    from rich.text import Text

    status = status_of(run)
    console.print(Text.assemble((run.id, "bold"), f" is {status.state.value}, attempt {status.attempt}, in {run.uri}"))
    try:
        watch(run, console, since=time.time())
    except KeyboardInterrupt:
        console.print(f"\nIt continues. Stop it with: sm-llm stop {quoted(run.uri)}", soft_wrap=True)
        return None
    _close(run, console)
    return run.state


def see_it_stop(run: RunHandle, console: Console) -> RunState:
    """Show what a run that was asked to stop still does, and in which state it ends."""
    asked = time.time()
    watch(run, console, since=asked)
    _close(run, console)
    return run.state


def _close(run: RunHandle, console: Console) -> None:
    from sm_llm.launcher.display.summary import print_summary

    print_summary(run, console, _plot(run))


@contextlib.contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of raising ``KeyboardInterrupt``: it is meant for the run, not for whoever watches it.

    Outside the main thread Python delivers no signals, so there is nothing to collect.
    """
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    # A handler does as little as possible: it may run between any two instructions.
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def begin(run: RunHandle, console: Console) -> None:
    """Where the run lives and how to get back to it."""
    from rich.text import Text

    verb = "continues" if run.continued_attempt else "starts"
    attempt = f" as attempt {run.continued_attempt} of an unfinished run" if run.continued_attempt else ""
    console.print(Text.assemble((run.id, "bold"), f" {verb}{attempt} in {run.uri}"), soft_wrap=True)
    # Steps that compute on the same devices are one line.
    if devices := dict.fromkeys(filter(None, (it.get("facts", {}).get("devices") for it in run.record.plan))):
        console.print(f"It computes on: {'; '.join(devices)}", style="dim", soft_wrap=True)
    where = "It runs in the background" if run.is_local else f"It is {run.native_uri}"
    for plan in run.record.plan:
        prefix = f"{plan['step']}: " if plan.get("step") else ""
        # The record's words are those of the first launch; files beside the specification may have changed since.
        shown = plan | run.continued_plans.get(plan.get("step") or "", {})
        settings = shown.get("settings", {})
        width = max(10, *map(len, settings), 0)
        for name, value in settings.items():
            console.print(f"  {prefix}{name:<{width}} {value}", soft_wrap=True)
        for warning in shown.get("warnings", ()):
            console.print(f"  {prefix}warning: {warning}", style="yellow", soft_wrap=True)
    hint = f"{where}; follow it from anywhere with: sm-llm logs -f {quoted(run.uri)}"
    console.print(hint, style="dim", soft_wrap=True)


def _plot(run: RunHandle) -> str | None:
    """The plot of a training run; a run without steps, or without matplotlib, simply has none."""
    from sm_llm.launcher.display.plot import plot_run

    try:
        return str(plot_run(run.job.events, run.paths.plot, title=run.id))
    except SmLlmError:
        return None


def watch(run: RunHandle, console: Console, interrupts: Sequence[int] = (), *, since: float | None = None) -> None:
    """Show ``run`` on ``console`` until it has ended; every new item of ``interrupts`` asks it to stop.

    Events before ``since`` (seconds since the epoch) are not shown again.
    """
    if not console.is_terminal:
        _watch(run, console, None, interrupts, since)
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text("starting …", style="dim"), console=console, refresh_per_second=8, transient=True) as live:
        _watch(run, console, live, interrupts, since)


def _watch(run: RunHandle, console: Console, live: Live | None, interrupts: Sequence[int], since: float | None) -> None:
    displays: dict[str, Display] = {}
    passed_on = 0
    for found in follow(run):
        # Here and not in the signal handler, which only counts: a stop request is written to a store, which takes time
        # and may fail.
        if len(interrupts) > passed_on:
            passed_on += 1
            _pass_on(run, console, passed_on)
        if found is None:
            continue
        job, event = found
        # Steps of a workflow are jobs of their own, each with its own progress.
        if job.uri not in displays:
            displays[job.uri] = Display(console, live, job.uri.rpartition("/")[2] if job.uri != run.uri else job.kind)
        displays[job.uri].show(event, silently=since is not None and event["time"] < since)


def _pass_on(run: RunHandle, console: Console, count: int) -> None:
    from sm_llm.launcher.lifecycle import stop

    with contextlib.suppress(SubmitError):  # it may just have ended
        try:
            stop(run, now=count > 1)
        except StorageError as issue:
            console.print(f"it could not be asked to stop (Ctrl-C asks again): {issue}", style="yellow")
            return
        console.print("stopping … (Ctrl-C again kills it at once)" if count == 1 else "killing it", style="yellow")
