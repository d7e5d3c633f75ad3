"""Formats events and numbers as text: the lines that ``fit`` and ``status`` print."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sm_llm.runs.run_states import RunState
from sm_llm.terminal import counted, duration, size

if TYPE_CHECKING:
    from collections.abc import Mapping


STATE_STYLES = {
    RunState.COMPLETED: "green",
    RunState.UNCHANGED: "yellow",
    RunState.FAILED: "red",
    RunState.RUNNING: "cyan",
    RunState.INTERRUPTED: "yellow",
    RunState.STOPPED: "yellow",
    RunState.COMPLETED_UNPUBLISHED: "yellow",
}
"""Colours of rich for states that are shown in one."""


def training_line(
    step: Mapping[str, Any], speed: Mapping[str, Any], total_steps: int | None, eta_seconds: float | None
) -> str:
    """One logged step: loss, learning rate, gradient norm, speed, MFU, data wait and what is left."""
    of = f"/{total_steps}" if total_steps else ""
    parts = [
        f"step {step['step']}{of}",
        f"loss {step['loss']:.4f}",
        f"lr {step['learning_rate']:.2e}",
        f"grad norm {step['grad_norm']:.2f}",
        f"{speed['tokens_per_second']:,.0f} tokens/s",
    ]
    if speed.get("mfu") is not None:
        parts.append(f"MFU {speed['mfu']:.1%}")
    if speed["step_seconds"]:
        parts.append(f"data wait {min(1.0, speed['data_wait_seconds'] / speed['step_seconds']):.1%}")
    if eta_seconds and eta_seconds >= 1:
        parts.append(f"{duration(eta_seconds)} left")
    return "  ".join(parts)


def event_line(event: Mapping[str, Any]) -> str | None:
    """An event in one line for a reader; None for those that only feed the training line and the summary."""
    write = _WRITERS.get(event["kind"])
    return write(event) if write else None


def _attempt_started(event: Mapping[str, Any]) -> str:
    steps = f", {counted(event['total_steps'], 'step')}" if event["total_steps"] else ""
    return f"{counted(event['world_size'], 'process')} on {event['device']}{steps}"


def _start_chosen(event: Mapping[str, Any]) -> str:
    if event["source"] == "scratch":
        return "starts from scratch"
    where = f" {event['uri']}" if event.get("uri") else ""
    after = f", {counted(event['step'], 'step')} done" if event["step"] else ""
    return f"starts from {event['source']}{where}{after}"


def _validation(event: Mapping[str, Any]) -> str:
    perplexity = event["perplexity"]
    shown = f"{perplexity:,.1f}" if perplexity is not None and math.isfinite(perplexity) else "inf"
    return f"step {event['step']}: validation loss {event['validation_loss']:.4f}, perplexity {shown}"


def _checkpoint(event: Mapping[str, Any]) -> str:
    return (
        f"step {event['step']}: checkpoint published, {size(event['bytes'])} in {event['seconds']:.1f} s "
        f"(training waited {event['blocked_seconds']:.2f} s)"
        + (f", {event['superseded']} older saves left out" if event.get("superseded") else "")
    )


def _late(event: Mapping[str, Any]) -> str:
    last = "no checkpoint is published yet" if event["step"] is None else f"the last published step is {event['step']}"
    return f"alarm: {last}, {event['age_seconds']:,.0f} s ago: {event['reason']}"


def _restored(event: Mapping[str, Any]) -> str:
    return (
        f"step {event['step']}: checkpoint restored in {event['seconds']:.1f} s, {size(event['local_bytes'])} from "
        f"the nodes' disks, {size(event['fetched_bytes'])} from storage"
    )


_PARTS = {
    "detection": "detection_seconds",
    "requeue": "requeue_seconds",
    "start": "start_seconds",
    "restore": "restore_seconds",
    "first step": "first_step_seconds",
}


def _recovered(event: Mapping[str, Any]) -> str:
    known = {name: event[field] for name, field in _PARTS.items() if event[field] is not None}
    if "detection" not in known:
        known = {"down": event["down_seconds"], **known}
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in known.items())
    return f"recovered: step {event['step']} done {event['seconds']:.1f} s after the last sign of life ({parts})"


def _final(event: Mapping[str, Any]) -> str:
    return f"result published, {size(event['bytes'])}"


def _nothing_done(event: Mapping[str, Any]) -> str:
    return f"did nothing: {event['reason']}"


def _notice(event: Mapping[str, Any]) -> str:
    message = str(event["message"])
    return message if event["level"] == "info" else f"{event['level']}: {message}"


def _tracker_opened(event: Mapping[str, Any]) -> str:
    return f"{event['tracker']}: {event['uri'] or event['id']}"


def _stop_requested(event: Mapping[str, Any]) -> str:
    return "it is being killed" if event["now"] else "asked to stop after the current step"


def _account(event: Mapping[str, Any]) -> str:
    account = event["account"]
    rows = sum(split["rows"] for split in account["splits"].values())
    dropped = account["tokens_in"] - account["tokens_kept"]
    return (
        f"prepared {counted(rows, 'row')} from {counted(account['documents']['used'], 'document')}: "
        f"{counted(account['tokens_in'], 'token')} in, {account['tokens_kept']:,} kept, {dropped:,} dropped"
    )


_WRITERS = {
    "attempt_started": _attempt_started,
    "start_chosen": _start_chosen,
    "validation": _validation,
    "checkpoint_published": _checkpoint,
    "publication_late": _late,
    "checkpoint_restored": _restored,
    "recovered": _recovered,
    "final_published": _final,
    "nothing_done": _nothing_done,
    "notice": _notice,
    "stop_requested": _stop_requested,
    "account": _account,
    "tracker_opened": _tracker_opened,
}


_LEAST_WORDS = 24
"""Columns that a text needs beside a name; with fewer it begins below it."""


def listed(name: str, text: str, longest: int, columns: int) -> list[str]:
    """A name, whole, and a text beside it in lines of ``columns``; ``longest`` is the longest name of the list."""
    from textwrap import TextWrapper

    beside = columns - longest - 2 >= _LEAST_WORDS
    indent = " " * (longest + 2 if beside else 2)
    wrapper = TextWrapper(max(columns, 1), indent, indent, break_long_words=False, break_on_hyphens=False)
    lines = wrapper.wrap(text)
    if not beside or not lines:
        return [name, *lines]
    return [f"{name:<{longest}}  {lines[0].lstrip()}", *lines[1:]]
