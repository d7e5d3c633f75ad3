"""Formats events and numbers as text: the lines that ``fit`` and ``status`` print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sm_llm.runs.run_states import RunState
from sm_llm.terminal import duration

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


# Columns that a text needs beside a name; with fewer it begins below it.
_LEAST_WORDS = 24


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
