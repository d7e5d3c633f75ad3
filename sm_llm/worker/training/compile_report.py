"""What is reported of compiled layers; apart from ``strategies``, since every image imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.terminal import counted

if TYPE_CHECKING:
    from sm_llm.runs.events.events import LayersCompiled

# Layers that a warning names.
_NAMED = 4


def warning(report: LayersCompiled) -> str | None:
    """What a person must know of layers that are not one compiled graph each; None if all are."""
    issues = [
        f"{_named(names)} {verb}"
        for names, verb in (
            (report.eager, "run eagerly, without any compiled graph"),
            (report.broken, "run as several graphs with eager code between them"),
        )
        if names
    ]
    if not issues:
        return None
    reasons = "; ".join(f"{text} ({count} x)" for text, count in report.graph_breaks.items()) or "none given by torch"
    return (
        f"task.precision.compile is true, but of {counted(report.layers, 'layer')} {' and '.join(issues)}. "
        f"Losses are not affected, speed is. Reasons: {reasons}. TORCH_LOGS=graph_breaks,recompiles shows where"
    )


def _named(names: list[str]) -> str:
    others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
    return f"{len(names)} ({', '.join(names[:_NAMED])}{others})"
