"""Events as lines of text for readers: what ``fit``, ``status`` and the training line's neighbours print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.terminal import counted, size

if TYPE_CHECKING:
    from collections.abc import Mapping


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


def _attention_chosen(event: Mapping[str, Any]) -> str:
    if not event["reasons"]:
        return f"attention: {event['attention']}"
    return f"attention: {event['attention']} in place of {event['expected']}: {'; '.join(event['reasons'])}"


def _collectives_chosen(event: Mapping[str, Any]) -> str:
    reason = f" (no copy engines: {event['reason']})" if event["reason"] else ""
    return f"collectives: {event['collectives']}{reason}"


def _start_measured(event: Mapping[str, Any]) -> str:
    # A tenth of a second is the least that is shown.
    phases = [f"{name} {seconds:.1f} s" for name, seconds in event["phases"].items() if seconds >= 0.05]
    return f"step {event['step']} done {event['seconds']:.1f} s after the start: {', '.join(phases)}"


def _validation(event: Mapping[str, Any]) -> str:
    perplexity = event["perplexity"]
    # exp of a large loss is infinite.
    shown = "inf" if perplexity is None else f"{perplexity:,.1f}"
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
    # Without a time of failure the parts before the new start are one.
    if "detection" not in known:
        known = {"down": event["down_seconds"], **known}
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in known.items())
    return f"recovered: step {event['step']} done {event['seconds']:.1f} s after the last sign of life ({parts})"


_WRITERS = {
    # Kinds that are not here are shown elsewhere: steps by the training line, failures by the outcome.
    "attempt_started": _attempt_started,
    "start_chosen": _start_chosen,
    "attention_chosen": _attention_chosen,
    "collectives_chosen": _collectives_chosen,
    "start_measured": _start_measured,
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
