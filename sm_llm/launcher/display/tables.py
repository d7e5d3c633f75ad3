"""Tables for people: plans, the status of runs, metrics."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.launcher.display.formatting import STATE_STYLES
from sm_llm.runs.run_states import RunState
from sm_llm.spec.job_machines import groups, smallest_card
from sm_llm.spec.loading.yaml_text import to_typed
from sm_llm.spec.tasks import parallelism_of
from sm_llm.terminal import big, counted, duration, moment, quoted, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import JustifyMethod
    from rich.table import Table
    from rich.text import Text

    from sm_llm.launcher.observe.listed import Listed
    from sm_llm.launcher.observe.status import Status
    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.run_handle import RunHandle
    from sm_llm.runs.events.run_metrics import MetricRow
    from sm_llm.spec.derive import Derived
    from sm_llm.storage.publication.publish import CheckpointInfo

# Nodes whose commands are shown.
_COMMANDS = 2


def plan_table(plan: Plan) -> Table:
    """One plan as a table of names and values."""
    from rich.text import Text

    table = _pairs(f"{plan.job.name}" + (f"  (step {plan.step})" if plan.step else ""))
    for name, value in _plan_rows(plan):
        _add(table, name, value)
    for warning in plan.warnings:
        _add(table, Text("warning", "yellow"), Text(warning, "yellow"))
    for issue in plan.unsupported:
        _add(table, Text("cannot run", "red"), Text(str(issue), "red"))
    return table


def _plan_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    yield "task", plan.job.task.kind + (f" (after {', '.join(plan.after)})" if plan.after else "")
    yield "runs on", f"{plan.job.backend.name}: {_machines(plan)}"
    yield from plan.settings.items()
    if plan.model is not None:
        yield from _model_rows(plan)
    if plan.derived is not None:
        yield from _batch_rows(plan)
        yield from _length_rows(plan)
    if plan.job.task.kind == "prepare":
        yield "writes", f"rows of {plan.job.task.seq_length:,} tokens"
    if plan.job.task.kind == "fetch":
        yield "fetches", plan.job.task.source
    yield "storage", plan.job.storage
    yield "spec digest", plan.digest[:16]
    yield from plan.facts.items()
    yield from _command_rows(plan)


def _machines(plan: Plan) -> str:
    compute = plan.job.compute
    nodes = [f"{it.instance_count} x {it.instance_type}" for it in groups(plan.job)]
    if not nodes and compute.instance_type is not None:
        nodes = [f"{compute.instance_count} x {compute.instance_type}"]
    where = f"{' and '.join(nodes)}, " if nodes else ""
    return f"{where}{compute.instance_count} x {compute.processes} = {counted(plan.world_size, 'process')}"


def _command_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    """The commands of the first nodes: on a hundred nodes they differ in little, and ``--json`` has all."""
    for node, argv in enumerate(plan.command[:_COMMANDS]):
        yield "command" if node == 0 else f"command of node {node}", quoted(*argv)
    if len(plan.command) > _COMMANDS:
        yield "", f"and so on to node {len(plan.command) - 1}"


def _model_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    model = plan.model
    assert model is not None
    yield "model", f"{model.model_type}, {model.parameters:,} parameters ({big(model.parameters)})"
    spec = parallelism_of(plan.job.task)
    if spec is not None and (arrangement := spec.arrangement(model.key_value_heads)) is not None:
        yield "degrees", arrangement
    yield "FLOPs per token", f"{model.flops_per_token:,.0f} = {model.flops_formula}"
    if plan.total_flops is not None:
        yield "FLOPs in all", f"{plan.total_flops:.3g}"
    card = smallest_card(plan.job)
    if plan.choice is not None:
        yield "chosen settings", str(plan.choice)
    if plan.attention is not None:
        yield "attention", f"{plan.attention} (expected; the worker reports what computes it)"
    if plan.memory is not None and card is not None:
        yield f"memory of a {'NeuronCore' if card.is_neuron else 'GPU'}", plan.memory.describe(card)


def _batch_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    derived = plan.derived
    assert derived is not None
    yield "data-parallel degree", str(derived.data_parallel_degree)
    ranks = counted(derived.data_parallel_degree, "rank")
    product = f"{derived.micro_batch_size} x {ranks} x {derived.accumulation_steps} accumulated"
    tokens = counted(derived.tokens_per_step, "token")
    yield "global batch", f"{counted(derived.global_batch_size, 'sequence')} = {product}; {tokens}"


def _length_rows(plan: Plan) -> Iterable[tuple[str, str]]:
    derived = plan.derived
    assert derived is not None
    unknown = "known once the rows are"
    if derived.total_steps is None or derived.total_tokens is None:
        yield "length", unknown
    else:
        steps, tokens = counted(derived.total_steps, "step"), counted(derived.total_tokens, "token")
        yield "length", f"{steps}, {tokens}{_epochs(plan, derived)}"
    yield "warm-up", unknown if derived.warmup_steps is None else counted(derived.warmup_steps, "step")
    every = derived.checkpoint_every
    saved = _every(every) if every else unknown
    facts = plan.model
    amount = f"{size(facts.checkpoint_bytes)} each ({facts.checkpoint_holds}), " if facts else ""
    yield "checkpoints", f"{amount}{saved}, the last {plan.job.task.checkpoint.keep_last} kept"  # type: ignore[union-attr]
    if derived.validation_every:
        from sm_llm.launcher.planning.unread_settings import has_validation

        has_rows = has_validation(plan.job.task)  # type: ignore[arg-type]
        yield "validation", _every(derived.validation_every) if has_rows else "none: task.data names no validation rows"


def _epochs(plan: Plan, derived: Derived) -> str:
    steps, epochs = derived.total_steps, derived.epochs
    if not epochs or steps is None:
        is_of_rows = plan.rows is None and plan.job.task.data.format == "rows"  # type: ignore[union-attr]
        return f"; an epoch has rows / {derived.global_batch_size:,} steps" if is_of_rows else ""
    amount, length = f"{epochs:.3g}", f"{steps / epochs:,.1f}".removesuffix(".0")
    return f", {amount} {'epoch' if amount == '1' else 'epochs'} of {length} {'step' if length == '1' else 'steps'}"


def _every(steps: int) -> str:
    """``every 20 steps``."""
    return "every step" if steps == 1 else f"every {counted(steps, 'step')}"


def _add(table: Table, *cells: str | Text) -> None:
    """A row whose texts are no markup, whatever console shows it."""
    from rich.text import Text

    table.add_row(*(Text(it) if isinstance(it, str) else it for it in cells))


def _pairs(title: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def status_table(status: Status) -> Table:
    """A run's status as a table of names and values."""
    from rich.text import Text

    table = _pairs(status.run_id)
    style = STATE_STYLES.get(status.state, "")
    reason = f": {status.reason}" if status.reason else ""
    is_stated = (status.reason or "").startswith("stopping")  # in the platform's own words
    stopping = " (stopping)" if status.progress.stopping and not status.state.is_final and not is_stated else ""
    words = f"{status.state.value}{stopping}"
    _add(table, "state", Text.assemble((words, style), reason))
    _add(table, "attempt", f"{status.attempt} ({status.native_uri})" if status.native_uri else "none yet")
    if status.dropped_changes:
        _add(table, "changes", status.dropped_changes)
    for name, value in _progress_rows(status):
        _add(table, name, value)
    for step in status.steps:
        _add(table, f"step {step.uri.rpartition('/')[2]}", step.state.value)
    _add(table, "storage" if "://" in status.uri else "folder", status.uri)
    if status.result:
        from sm_llm.runs.results import RESULT_LINK

        link = Path(status.uri) / RESULT_LINK  # of a run in S3 no such file exists anywhere
        _add(table, "result", str(link) if link.exists() else status.result)
    return table


def _progress_rows(status: Status) -> Iterable[tuple[str | Text, str | Text]]:
    from rich.text import Text

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
    if now.attention:
        yield "attention", now.attention
    if now.start_up:
        yield "start-up", now.start_up
    if now.recovery:
        yield "newest recovery", now.recovery
    if now.alarm and not status.state.is_final:
        yield Text("checkpoints", "red"), Text(now.alarm, "red")
    if status.started and status.ended:
        yield "took", duration(status.ended - status.started)
    elif status.started and not status.state.is_final:
        began = "waiting since" if status.state is RunState.PENDING else "running since"
        yield began, f"{moment(status.started)} ({duration(time.time() - status.started)})"
    if status.billable_seconds is not None:
        yield "billed", _bill(status.billable_seconds, status.used_seconds)
    yield from status.trackers.items()


def _bill(billed: int, used: int | None) -> str:
    """What is billed, and what spot capacity saved of it."""
    saved = f", {1 - billed / used:.0%} less than the {duration(used)} used" if used and billed < used else ""
    return f"{duration(billed)} of all nodes together{saved}"


_RUN_COLUMNS = ("run", "state", "kind", "step", "loss", "attempts", "began", "took")
# Columns of runs that a narrow terminal does without, the first of them first.
_LEFT_OUT = ("kind", "attempts", "began", "took", "loss", "step")


def runs_table(runs: Sequence[Listed], width: int | None = None) -> Table:
    """The runs of a storage root. One that has no end time is still running.

    ``width`` is that of the terminal: columns that do not fit are left out, so that ids and numbers stay whole.
    """
    return _fitted([_run_cells(run) for run in runs], _RUN_COLUMNS, width, _LEFT_OUT)


def _run_cells(run: Listed) -> dict[str, str | Text]:
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    return {
        "run": run.run_id,
        "state": _state(run.state),
        "kind": run.kind,
        "step": f"{run.step:,}{total}" if run.step or total else "",
        "loss": "" if run.loss is None else f"{run.loss:.4f}",
        "attempts": str(run.attempts),
        "began": "" if run.created is None else moment(run.created),
        "took": _took(run.started, run.ended, run.state),
    }


def _fitted(
    rows: Sequence[Mapping[str, str | Text]], names: Sequence[str], width: int | None, left_out: Sequence[str],
    *, folded: str = "", justify: JustifyMethod = "left",
) -> Table:  # fmt: skip
    """A table whose values stay whole at ``width`` characters, but for those of the column ``folded``.

    Columns that do not fit are left out, the first of ``left_out`` first, and named below the table.
    """
    kept = list(names)
    for name in left_out:
        if width is None or sum(_needed(it, rows, it == folded) for it in kept) + 1 <= width:
            break
        kept.remove(name)
    table = _columns(*kept)
    is_tight = width is not None and sum(_needed(it, rows, it == folded) for it in kept) + 1 > width
    for column, name in zip(table.columns, kept, strict=True):
        # Where not even these fit, a value is folded: cut off, it would be another one.
        column.no_wrap, column.justify = name == kept[0] or (name != folded and not is_tight), justify
    table.columns[0].min_width = _longest(kept[0], rows)  # what is there to be copied, however narrow it is
    for row in rows:
        _add(table, *(row[name] for name in kept))
    if len(kept) < len(names):
        gone = ", ".join(name for name in names if name not in kept)
        table.caption, table.caption_justify = f"too narrow for: {gone}", "left"
    return table


_FOLDED_WIDTH = 20


def _needed(name: str, rows: Sequence[Mapping[str, str | Text]], is_folded: bool) -> int:
    """Characters that a column takes with its margins."""
    return min(_longest(name, rows), _FOLDED_WIDTH if is_folded else sys.maxsize) + 3


def _longest(name: str, rows: Sequence[Mapping[str, str | Text]]) -> int:
    return max(len(name), *(len(row[name]) for row in rows), 0)


_ATTEMPT_COLUMNS = ("attempt", "state", "began", "took", "from step", "process", "reason")
_OF_ATTEMPTS_LEFT_OUT = ("process", "from step", "took", "began")


def attempts_table(run: RunHandle, width: int | None = None) -> Table:
    """Every start of a run; one that has not ended is in the run's state. ``width`` as for ``runs_table``."""
    record, now = run.record, run.state
    rows: list[Mapping[str, str | Text]] = []
    for it in record.attempts:
        start = "" if it.start is None else str(it.start.step)
        changes = ", ".join(record.changes.get(it.number, ()))
        words = "; ".join(filter(None, [it.reason, f"resumed with {changes}" if changes else "", it.dropped_sentence]))
        process = f"{it.host}/{it.native_id}" if it.host else it.native_id
        # An earlier attempt without a state is one whose end nobody recorded, because its supervisor was killed.
        state = it.state or (now if it.number == record.attempts[-1].number else RunState.INTERRUPTED)
        took = _took(it.started, it.ended, state)
        cells = (str(it.number), _state(state), moment(it.started), took, start, process, words)
        rows.append(dict(zip(_ATTEMPT_COLUMNS, cells, strict=True)))
    return _fitted(rows, _ATTEMPT_COLUMNS, width, _OF_ATTEMPTS_LEFT_OUT, folded="reason")


def checkpoints_table(found: Sequence[CheckpointInfo]) -> Table:
    """Committed checkpoints with their age, and what is wrong with those that cannot be used."""
    from rich.text import Text

    table = _columns("step", "size", "age", "usable")
    for it in found:
        age = "" if it.time is None else duration(time.time() - it.time)
        usable = Text("yes", "green") if it.valid else Text.assemble(("no", "red"), f": {it.reason}")
        _add(table, f"{it.step:,}", size(it.size), age, usable)
    return table


def _state(state: RunState) -> Text:
    from rich.text import Text

    return Text(state.value, STATE_STYLES.get(state, ""))


def _took(started: float | None, ended: float | None, state: RunState) -> str:
    if started is None:
        return ""
    if ended is not None:
        return duration(ended - started)
    return "" if state.is_final else f"{duration(time.time() - started)}, still running"


def _columns(*names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def origins_table(rows: Sequence[tuple[str, Any, str]], width: int | None = None) -> Table:
    """A specification's values and where each came from; what nobody wrote is dim. ``width`` as for ``runs_table``."""
    from rich.text import Text

    names = ("key", "value", "from")
    found: list[Mapping[str, str | Text]] = []
    for path, value, origin in rows:
        style = "dim" if origin == "default" else ""
        cells = (Text(text, style) for text in (path, to_typed(value), origin))
        found.append(dict(zip(names, cells, strict=True)))
    return _fitted(found, names, width, ("from",), folded="value")


METRIC_COLUMNS = ("step", "loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu")


_OF_METRICS_LEFT_OUT = ("mfu", "tokens per second", "grad norm", "learning rate", "validation loss")


def metrics_table(rows: Sequence[MetricRow], width: int | None = None) -> Table:
    """Metrics as a table; ``--json`` has every field with every digit. ``width`` as for ``runs_table``.

    Values that a program has logged under names of its own have columns of their own, in place of those that no row
    has a value for.
    """
    from sm_llm.runs.events.run_metrics import own_names

    own = own_names(rows)
    keys = [it for it in METRIC_COLUMNS if not own or it == "step" or any(row.get(it) is not None for row in rows)]
    # Under its own name, whatever it looks like; ours are written with spaces.
    names = {**{key: key.replace("_", " ") for key in keys}, **{key: key for key in own}}
    found = [{label: _cell(key, row.get(key)) for key, label in names.items()} for row in rows]
    left_out = (*reversed(own), *_OF_METRICS_LEFT_OUT)
    kept = [label for label in left_out if label in names.values()]
    return _fitted(found, list(names.values()), width, kept, justify="right")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    formats = {"learning_rate": "{:.3e}", "tokens_per_second": "{:,.0f}", "mfu": "{:.1%}", "step": "{}"}
    # Of a program's own values the size is not known.
    return formats.get(name, "{:.4f}" if name in METRIC_COLUMNS else "{:.6g}").format(value)
