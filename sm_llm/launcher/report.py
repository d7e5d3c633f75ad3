"""Tables and closing words for people: plans, status, metrics and what to do with a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.states import RunState
from sm_llm.launcher.lines import big, duration, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

    from sm_llm.launcher.metrics import MetricRow
    from sm_llm.launcher.plan import Plan
    from sm_llm.launcher.run import Run, Status

_STYLES = {
    RunState.COMPLETED: "green",
    RunState.FAILED: "red",
    RunState.RUNNING: "cyan",
    RunState.INTERRUPTED: "yellow",
    RunState.STOPPED: "yellow",
    RunState.COMPLETED_UNPUBLISHED: "yellow",
}


def plan_table(plan: Plan) -> Table:
    """One plan as a table of names and values."""
    table = _pairs(f"{plan.job.name}" + (f"  (step {plan.step})" if plan.step else ""))
    for name, value in _plan_rows(plan):
        table.add_row(name, value)
    return table


def _plan_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    compute = plan.job.compute
    yield "task", plan.job.task.kind + (f" (after {', '.join(plan.after)})" if plan.after else "")
    yield (
        "runs on",
        (
            f"{plan.job.backend.name}: {compute.instance_count} x {compute.processes_per_instance} = "
            f"{plan.world_size} process{'es' if plan.world_size > 1 else ''}"
        ),
    )
    if plan.model is not None:
        yield from _model_rows(plan)
    if plan.derived is not None:
        yield from _batch_rows(plan)
        yield from _length_rows(plan)
    if plan.job.task.kind == "prepare":
        yield "reads", ", ".join(plan.job.task.sources)
        yield "writes", f"rows of {plan.job.task.seq_length:,} tokens"
    yield "storage", plan.job.storage
    yield "spec digest", plan.digest[:16]
    for node, argv in enumerate(plan.command):
        yield "command" if node == 0 else f"command of node {node}", " ".join(argv)
    for warning in plan.warnings:
        yield "[yellow]warning[/]", f"[yellow]{warning}[/]"


def _model_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    model = plan.model
    assert model is not None
    yield "model", f"{model.model_type}, {model.parameters:,} parameters ({big(model.parameters)})"
    yield "FLOPs per token", f"{model.flops_per_token:,.0f} = {model.flops_formula}"
    if plan.total_flops is not None:
        yield "FLOPs in all", f"{plan.total_flops:.3g}"


def _batch_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    derived = plan.derived
    assert derived is not None
    yield "data-parallel degree", str(derived.data_parallel_degree)
    ranks = (
        f"{derived.micro_batch_size} x {derived.data_parallel_degree} ranks x {derived.accumulation_steps} accumulated"
    )
    yield "global batch", f"{derived.global_batch_size:,} sequences = {ranks}; {derived.tokens_per_step:,} tokens"


def _length_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    derived = plan.derived
    assert derived is not None
    unknown = "known once the rows are"
    if derived.total_steps is None:
        yield "length", unknown
    else:
        epochs = f", {derived.epochs:.3g} epochs" if derived.epochs is not None else ""
        yield "length", f"{derived.total_steps:,} steps, {derived.total_tokens:,} tokens{epochs}"
    yield "warm-up", unknown if derived.warmup_steps is None else f"{derived.warmup_steps:,} steps"
    every = derived.checkpoint_every
    saved = f"every {every:,} steps" if every else unknown
    amount = f"{size(plan.model.checkpoint_bytes)} each (fp32 weights and two AdamW moments), " if plan.model else ""
    yield "checkpoints", f"{amount}{saved}, the last {plan.job.task.checkpoint.keep_last} kept"  # type: ignore[union-attr]
    if derived.validation_every:
        yield "validation", f"every {derived.validation_every:,} steps"


def _pairs(title: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def status_table(status: Status) -> Table:
    """A run's status as a table of names and values."""
    table = _pairs(status.run_id)
    style = _STYLES.get(status.state, "")
    reason = f": {status.reason}" if status.reason else ""
    table.add_row("state", f"[{style}]{status.state.value}[/]{reason}" if style else status.state.value)
    table.add_row("attempt", f"{status.attempt} (process {status.native_id})" if status.native_id else "none yet")
    for name, value in _progress_rows(status):
        table.add_row(name, value)
    for step in status.steps:
        table.add_row(f"step {step.uri.rpartition('/')[2]}", step.state.value)
    table.add_row("folder", status.uri)
    if status.result:
        from sm_llm.launcher.results import RESULT_LINK

        link = Path(status.uri) / RESULT_LINK
        table.add_row("result", str(link) if link.exists() else status.result)
    return table


def _progress_rows(status: Status) -> Iterable[tuple[str, str]]:
    now = status.progress
    if now.total_steps or now.step:
        yield "step", f"{now.step:,} of {now.total_steps or '?'}"
    elif now.phase:
        yield now.phase, f"{big(now.done or 0)}{' of ' + big(now.total) if now.total else ''} {now.unit}"
    if now.loss is not None:
        yield "loss", f"{now.loss:.4f}"
    if now.validation_loss is not None:
        yield "validation loss", f"{now.validation_loss:.4f}"
    if now.tokens_per_second is not None:
        yield "speed", f"{now.tokens_per_second:,.0f} tokens/s"
    if now.eta_seconds and not status.state.is_final:
        yield "left", duration(now.eta_seconds)
    if status.started and status.ended:
        yield "took", duration(status.ended - status.started)


def origins_table(rows: Sequence[tuple[str, Any, str]]) -> Table:
    """A specification's values and where each came from; what nobody wrote is dim."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for name in ("key", "value", "from"):
        table.add_column(name, overflow="fold")
    for path, value, origin in rows:
        style = "dim" if origin == "default" else ""
        table.add_row(*(Text(text, style) for text in (path, _scalar(value), origin)))
    return table


def _scalar(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


METRIC_COLUMNS = ("step", "loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu")


def metrics_table(rows: Sequence[MetricRow]) -> Table:
    """Metrics as a table; ``--json`` has every field with every digit."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in METRIC_COLUMNS:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(name, row.get(name)) for name in METRIC_COLUMNS))
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    formats = {"learning_rate": "{:.3e}", "tokens_per_second": "{:,.0f}", "mfu": "{:.1%}", "step": "{}"}
    return formats.get(name, "{:.4f}").format(value)


def closing(run: Run, console: Console, plot: str | None) -> None:
    """What a person wants to know when ``fit`` ends: how it went, where everything is, how to load or continue it."""
    from rich.markup import escape

    status = run.status()
    took = f" in {duration(status.ended - status.started)}" if status.started and status.ended else ""
    style = _STYLES.get(status.state, "")
    reason = f": {escape(status.reason)}" if status.reason else _reached(status)
    console.print(f"\n[bold {style}]{status.state.value}[/]{took}{reason}", soft_wrap=True)
    places = [("run", run.uri), ("result", run.result_link), ("plot", plot)]
    for name, value in places:
        if value:
            console.print(f"  {name:<9} {escape(str(value))}", soft_wrap=True)
    console.print(f"  {'more':<9} sm-llm status|metrics|logs {escape(run.uri)}", soft_wrap=True)
    if status.state is RunState.COMPLETED:
        _print_sample(run, console)
        _print_loading(run, console)
    elif status.state is RunState.STOPPED:
        console.print("\nThe same command starts it again.")
    else:
        console.print("\nThe same command continues it from its newest checkpoint.")


def _reached(status: Status) -> str:
    now = status.progress
    parts = [f"loss {now.loss:.4f}"] if now.loss is not None else []
    parts += [f"validation loss {now.validation_loss:.4f}"] if now.validation_loss is not None else []
    return f" at {', '.join(parts)}" if parts else ""


def _print_sample(run: Run, console: Console) -> None:
    from sm_llm.contract.events import read_events

    samples = [event for event in read_events(run.job.paths.events) if event["kind"] == "sample"]
    if samples:
        console.print("\n[bold]A sample of what it writes[/]")
        console.print(f"[cyan]{_escape(samples[-1]['prompt'])}[/]{_escape(samples[-1]['text'])}", soft_wrap=True)


def _print_loading(run: Run, console: Console) -> None:
    folder = run.result_link
    if folder is None:
        return
    console.print("\n[bold]Load it with[/]")
    if run.job.kind == "train":
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f'model = AutoModelForCausalLM.from_pretrained("{folder}")',
        ]
        if (folder / "tokenizer.json").is_file():
            lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{folder}")')
    else:
        lines = ["from datasets import load_from_disk", f'rows = load_from_disk("{folder}/train")']
    for line in lines:
        console.print(f"  {_escape(line)}", soft_wrap=True, highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
