"""Tables of what gpu_train.py has measured: ``python benchmarks/gpu_report.py FILE [FILE …]`` joins several calls.

Medians over all rounds: a row for each setting and subject, ratios to their bars, predicted against measured peaks, and
how long starts took.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_settings import OURS, RATIOS, SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Turns = dict[str, dict[str, list[dict[str, Any]]]]
"""Setting -> subject -> what each of its turns has found."""

HEAD = (
    "| setting | subject | turns | tokens/s per GPU | MFU | step ms (smallest to largest) | allocated (predicted) "
    "| reserved | card (predicted) | first step s, new / later | compiled layers | attention | collectives | losses |"
)
AUTO = "auto"
_NEAR, _BELOW = 0.08, 0.05
"""How far a prediction may be from what was allocated: either way, and under it."""


def joined(files: Iterable[Path]) -> Turns:
    """The turns of several calls."""
    found: Turns = {}
    for file in files:
        for name, by_subject in json.loads(file.read_text(encoding="utf-8")).items():
            for subject, turns in by_subject.items():
                found.setdefault(name, {}).setdefault(subject, []).extend(turns)
    return found


def row(name: str, subject: str, turns: Sequence[dict[str, Any]]) -> str:
    """The medians of one subject's turns."""

    def median(read: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(read, turns))

    rates = [it["tokens_per_second_per_gpu"] for it in turns]
    rate = f"{statistics.median(rates):,.0f}"
    spread = f" ({min(rates):,.0f} to {max(rates):,.0f})" if len(turns) > 1 else ""
    mfu = "" if turns[0]["mfu"] is None else f"{median(lambda it: it['mfu']):.1%}"
    starts = [it["started"] for it in turns]
    later = [statistics.median(starts[1:])] if len(starts) > 1 else []
    low, high = min(it["steps"][0] for it in turns), max(it["steps"][2] for it in turns)
    predicted = turns[0].get("predicted") or {}
    sizes = " | ".join(
        f"{median(lambda it, k=key: it[k]):.1f}" + (f" ({predicted[key]:.1f})" if key in predicted else "")  # type: ignore[misc]
        for key in ("allocated", "reserved", "by_card")
    )
    losses = ", ".join(f"{it:.4f}" for it in turns[0]["losses"])
    return (
        f"| {name} | {subject} | {len(turns)} | {rate}{spread} | {mfu} "
        f"| {median(lambda it: it['steps'][1]) * 1e3:.1f} ({low * 1e3:.1f} to {high * 1e3:.1f}) | {sizes} "
        f"| {' / '.join(f'{it:.1f}' for it in [starts[0], *later])} | {_compiled(turns[0])} "
        f"| {turns[0].get('attention') or ''} | {turns[0].get('collectives') or ''} | {losses} |"
    )


def _compiled(turn: dict[str, Any]) -> str:
    found = turn.get("layers_compiled")
    if found is None:
        return ""
    whole = found["layers"] - len(found["eager"]) - len(found["broken"])
    return f"{whole} of {found['layers']}"


def tables(found: Turns) -> Iterator[str]:
    """Everything, as lines of Markdown."""
    yield HEAD
    yield "|---" * (HEAD.count("|") - 1) + "|"
    for name, by_subject in found.items():
        for subject, turns in by_subject.items():
            yield row(name, subject, turns) if turns else f"| {name} | {subject} | none |" + " |" * 10
    first = next((it for by in found.values() for turns in by.values() for it in turns), None)
    if first is None:
        return
    yield f"\n{first['card']}, torch {first['torch']}; MFU: {first['flops_formula']}; memory in GiB"
    yield from ratios(found)
    yield from chosen(found)
    yield from peaks(found)
    yield from starts_of(found)
    yield from overheads(found)
    yield from saves_of(found)


def _rate(found: Turns, name: str, subject: str) -> float | None:
    turns = found.get(name, {}).get(subject)
    return statistics.median(it["tokens_per_second_per_gpu"] for it in turns) if turns else None


def ratios(found: Turns) -> Iterator[str]:
    """Of tokens/s, with their bars; those alone of which both sides were measured."""
    lines = []
    for it in RATIOS:
        ours, other = _rate(found, it.ours, OURS), _rate(found, *it.other)
        if ours is not None and other is not None:
            verdict = "met" if ours / other >= it.bar else "missed"
            lines.append(f"| {it.about} | {ours:,.0f} / {other:,.0f} | {ours / other:.3f} | {it.bar:.2f} | {verdict} |")
    if lines:
        yield from ("\n| ratio | tokens/s | measured | bar | |", "|---|---|---|---|---|", *lines)


def chosen(found: Turns) -> Iterator[str]:
    """What the planner has chosen, of settings that leave it open."""
    for name, by_subject in found.items():
        for turn in by_subject.get(OURS, [])[:1]:
            if AUTO in (SETTINGS[name].compile, SETTINGS[name].micro_batch_size):
                yield f"chosen for {name}: {', '.join(f'{key} {value}' for key, value in turn['settings'].items())}"


def peaks(found: Turns) -> Iterator[str]:
    """Predicted peaks over allocated ones."""
    errors = {}
    for name, by_subject in found.items():
        for turn in by_subject.get(OURS, [])[:1]:
            if turn.get("predicted"):
                errors[name] = turn["predicted"]["allocated"] / turn["allocated"] - 1
    if errors:
        near = sum(abs(it) <= _NEAR for it in errors.values())
        low, high = min(errors.values()), max(errors.values())
        yield (
            f"\npeaks: {near} of {len(errors)} settings predicted within {_NEAR:.0%}; "
            f"lowest {low:+.1%} (bar -{_BELOW:.0%}), highest {high:+.1%}"
        )


def starts_of(found: Turns) -> Iterator[str]:
    """The phases of ours, of the first turn and of the last, which finds compiled graphs."""
    for name, by_subject in found.items():
        turns = by_subject.get(OURS, [])
        for label, turn in zip(("new", "later"), turns[:1] + turns[1:][-1:], strict=False):
            phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in (turn.get("phases") or {}).items())
            if phases:
                yield f"start of {name}, {label}, s: {phases}"


def overheads(found: Turns) -> Iterator[str]:
    """The whole loop over its engine alone."""
    for name, by_subject in found.items():
        shares = [it for turn in by_subject.get(OURS, []) for it in turn.get("overhead") or []]
        if shares:
            yield (
                f"loop over engine, {name}: {statistics.median(shares):+.2%} (median of {len(shares)} pairs of blocks, "
                f"{min(shares):+.2%} to {max(shares):+.2%}; bar 1%)"
            )


def saves_of(found: Turns) -> Iterator[str]:
    """Asynchronous saves of ours: what the loop waited for, and how fast they were written and published."""
    for name, by_subject in found.items():
        for turn in by_subject.get(OURS, []):
            for save in turn.get("saves") or []:
                size = save["bytes"] / 1e9
                beside = ", while another one was being written" if save["overlaps"] else ""
                yield (
                    f"save of {name}, {size:.1f} GB{beside}: blocked {save['blocked']:.3f} s (bar 1 s the first time, "
                    f"0.3 s later), on disk after {save['written']:.1f} s ({size / save['written']:.1f} GB/s; bar 2), "
                    f"published after {save['published']:.1f} s, step beside it {save['step'] * 1e3:.0f} ms"
                )


if __name__ == "__main__":
    print("\n".join(tables(joined(map(Path, sys.argv[1:])))))
