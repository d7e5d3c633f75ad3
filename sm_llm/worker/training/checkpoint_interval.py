"""Logs how often a checkpoint comes once a step has been timed, and warns where an interruption would cost much."""

from __future__ import annotations

from sm_llm.terminal import counted

LONG_SECONDS = 2 * 3600.0
"""More work than this should not hang on one interruption."""
GOOD_SECONDS = 1800.0
"""What is proposed instead."""


def interval_message(every: int | None, total_steps: int, step_seconds: float) -> tuple[str, bool]:
    """One sentence about saving ``every`` steps, and whether it is a warning."""
    total_seconds = total_steps * step_seconds
    if every is None or every >= total_steps:
        lost = f"no checkpoint before the end of {counted(total_steps, 'step')} (about {_duration(total_seconds)})"
        return f"{lost}{_proposal(total_seconds, step_seconds)}", total_seconds > GOOD_SECONDS or every != total_steps
    seconds = every * step_seconds
    words = f"a checkpoint every {every} steps, about every {_duration(seconds)}"
    if seconds <= LONG_SECONDS:
        return words, False
    return f"{words}: an interruption costs up to that{_proposal(seconds, step_seconds)}", True


def _proposal(seconds: float, step_seconds: float) -> str:
    if seconds <= GOOD_SECONDS:
        return ""
    steps = max(1, round(GOOD_SECONDS / step_seconds))
    return f"; task.checkpoint.every_steps={steps} saves about every {_duration(steps * step_seconds)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
