"""The last words about a run: how it ended, where everything is, and how to load or continue it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from sm_llm.contract.failure import Cause
from sm_llm.launcher.display.formatting import STATE_STYLES
from sm_llm.launcher.observe.status import status_of
from sm_llm.runs.run_states import RunState
from sm_llm.terminal import duration, quoted

if TYPE_CHECKING:
    from rich.console import Console

    from sm_llm.launcher.observe.status import Status
    from sm_llm.launcher.run_handle import RunHandle


_COMMAND = re.compile(r"\bsm-llm (?:resume|rerun|branch|finish|fit)\b")


def print_summary(run: RunHandle, console: Console, plot: str | None) -> None:
    """What a person wants to know when ``fit`` ends: how it went, where everything is, how to load or continue it."""
    status = status_of(run)
    took = f" in {duration(status.ended - status.started)}" if status.started and status.ended else ""
    style = STATE_STYLES.get(status.state, "")
    reason = f": {status.reason}" if status.reason else _reached(status)
    console.print(Text.assemble("\n", (status.state.value, f"bold {style}".strip()), took, reason), soft_wrap=True)
    locations = [("run", run.uri), ("result", run.result_link), ("plot", plot)]
    for name, value in locations:
        if value:
            console.print(f"  {name:<9} {value}", soft_wrap=True)
    console.print(f"  {'more':<9} sm-llm status {quoted(run.uri)} (also metrics, logs)", soft_wrap=True)
    if status.state.is_completed:
        _print_sample(run, console)
        _print_loading(run, console)
        _print_rows(run, console)
    else:
        if status.dropped_changes:
            console.print(f"\n{status.dropped_changes}", soft_wrap=True)
        console.print(f"\n{_next(run, status)}", soft_wrap=True)


def _print_rows(run: RunHandle, console: Console) -> None:
    """Of a preparation: how many rows there are, and the next command to type."""
    from sm_llm.launcher.display.rows_summary import prepared_rows, rows_sentence, training_command

    found = prepared_rows(run) if run.job.kind == "prepare" else None
    if found is None or run.result_link is None:
        return
    console.print(f"\n{rows_sentence(found)}", soft_wrap=True)
    _print_heading(console, "Train on them with")
    console.print(f"  {training_command(found, str(run.result_link))}", soft_wrap=True)


def _next(run: RunHandle, status: Status) -> str:
    """What to do with a run that has not completed."""
    if status.state is RunState.COMPLETED_UNPUBLISHED:
        return f"Publish its result with: sm-llm finish {quoted(run.uri)}"
    checkpoints = [it.step for it in run.checkpoints() if it.valid]
    if status.dropped_changes and checkpoints:
        at = f"its newest checkpoint, step {checkpoints[-1]}"
        return f"Without them the run continues from {at}, with: sm-llm resume {quoted(run.uri)}"
    # A second command beside the one of the reason would be the one that fails again.
    if _COMMAND.search(status.reason or ""):
        newest = f"its newest checkpoint is of step {checkpoints[-1]}" if checkpoints else "it has no checkpoint yet"
        return f"What to do is in the reason above; {newest}."
    record = run.record
    # The command of the launch repeats neither the changes of a resume nor the run that a branch began from.
    is_as_launched = not record.changes and record.made_from is None
    if checkpoints:
        newest = f"it from its newest checkpoint, step {checkpoints[-1]}"
        resume = f"sm-llm resume {quoted(run.uri)}"
        # A resume with other data is refused, so the ways that accept them are named.
        if Cause.DATA in (status.reason or ""):
            branch = f"sm-llm branch {quoted(run.uri)} task.start.allow_other_data=true"
            other = (
                f"changed data need a new run, from this step: {branch}, or from step 0: sm-llm rerun {quoted(run.uri)}"
            )
            return f"With the same data continue {newest}, with: {resume}; {other}"
        once = "Once the cause is fixed, " if status.state is RunState.FAILED else ""
        text = f"the same command continues {newest}, and so does: {resume}" if is_as_launched else ""
        text = text or f"continue {newest}, with: {resume}"
        return once + text if once else text[0].upper() + text[1:]
    from sm_llm.runs.events.checkpoints import CheckpointPublished
    from sm_llm.runs.events.events import read_events

    if any(event["kind"] == CheckpointPublished.kind for event in read_events(run.job.events)):
        # Not "from its beginning": the worker refuses that while a published checkpoint is missing.
        anew = f"sm-llm rerun {quoted(run.uri)}"
        return f"It has published checkpoints, and its storage shows none. Bring ckpt/ back, or begin anew with: {anew}"
    if is_as_launched:
        return "It has no checkpoint yet: the same command starts it from its beginning."
    return f"It has no checkpoint yet. Begin anew with: sm-llm rerun {quoted(run.uri)}"


def _print_heading(console: Console, text: str) -> None:
    console.print(Text(f"\n{text}", "bold"))


def _reached(status: Status) -> str:
    now = status.progress
    parts = [f"loss {now.loss:.4f}"] if now.loss is not None else []
    if now.validation_loss is not None:
        doubt = "" if math.isfinite(now.validation_loss) else " (not finite: see the warnings in its logs)"
        parts.append(f"validation loss {now.validation_loss:.4f}{doubt}")
    return f" at {', '.join(parts)}" if parts else ""


def _print_sample(run: RunHandle, console: Console) -> None:
    from sm_llm.runs.events.events import read_events

    samples = [event for event in read_events(run.job.events) if event["kind"] == "sample"]
    if samples:
        _print_heading(console, "A sample of what it writes")
        sample = Text.assemble((str(samples[-1]["prompt"]), "cyan"), str(samples[-1]["text"]))
        console.print(sample, soft_wrap=True)


def _print_loading(run: RunHandle, console: Console) -> None:
    result = run.result_link
    if result is None:
        return
    if run.run_store.is_remote:
        _print_heading(console, "Get it with")
        console.print(f"  sm-llm sync {quoted(result, f'./{run.job.id}')}", soft_wrap=True)
    # A result in S3 is loaded from where the printed command copies it to.
    folder = Path(run.job.id) if run.run_store.is_remote else Path(result)
    if run.job.kind not in ("train", "prepare"):
        return  # what a script or a fetch leaves, nobody but its user knows
    _print_heading(console, "Load it with")
    if run.job.kind == "train":
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r})",
        ]
        if run.record.spec.get("task", {}).get("tokenizer") or (folder / "tokenizer.json").is_file():
            lines.append(f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})")
    else:
        lines = ["from datasets import load_from_disk", f"rows = load_from_disk({str(folder / 'train')!r})"]
    for line in lines:
        console.print(f"  {line}", soft_wrap=True)
