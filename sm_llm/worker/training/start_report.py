"""What is reported of a start: the kernel of attention, the collectives, how long the phases took, what was compiled
and what of fp8 is left out.

Apart from ``strategies``, since every image imports it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sm_llm.contract.fp8_products import fp8_products
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import StartMeasured
from sm_llm.worker.training import compile_report

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sm_llm.runs.events.events import AttentionChosen, CollectivesChosen, LayersCompiled
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.worker.context import WorkerContext


def report_products(context: WorkerContext, task: TrainTask, config: Mapping[str, Any]) -> None:
    """A warning of the products of the decoder layers that stay in bf16 although fp8 is asked for."""
    if task.precision.compute == "fp8" and (text := fp8_products(config).left_out):
        context.notice(f"task.precision.compute: {text}", "warning")


def report_attention(context: WorkerContext, found: AttentionChosen | None) -> None:
    """The kernel that computes attention; a warning where a faster one was expected. None: the engine does not say."""
    if found is None:
        return
    context.emit(found)
    if found.reasons:
        context.notice(
            f"attention is computed by {found.attention}, not by {found.expected}, which is faster on this GPU "
            f"(without cuDNN a step of 8B with 8,192 tokens takes 12% longer): {'; '.join(found.reasons)}",
            "warning",
        )
    else:
        context.log(str(event_line(asdict(found))))


def report_collectives(context: WorkerContext, found: CollectivesChosen | None) -> None:
    """What moves parameters and gradients between GPUs. None: nothing is sharded, or the engine does not say."""
    if found is not None:
        context.emit(found)
        context.log(str(event_line(asdict(found))))


def report_start(context: WorkerContext, step: int, compiled: LayersCompiled | None) -> None:
    """After an attempt's first step: how long it took to get there, and what of the layers runs as compiled graphs."""
    phases = context.start_phases
    start = StartMeasured(step, phases.seconds, phases.ended(None if compiled is None else compiled.seconds))
    context.emit(start)
    context.log(str(event_line(asdict(start))))
    if compiled is not None:
        context.emit(compiled)
        if text := compile_report.warning(compiled):
            context.notice(text, "warning")
