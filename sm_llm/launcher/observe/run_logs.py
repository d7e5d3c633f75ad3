"""The log lines of a run: of its jobs in turn, filtered, followed while they are written."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from pydantic import ValidationError

from sm_llm.errors import StorageError, UsageError
from sm_llm.launcher.log_filter import LogFilter
from sm_llm.launcher.observe.follow import has_begun_in
from sm_llm.spec.machines.compute import ComputeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.run_handle import RunHandle

_POLL_SECONDS = 0.5


def log_filter(
    tail: int | None, node: int | None, rank: int | None, pattern: str | None, *, raw: bool = False
) -> LogFilter:
    """The filter of these options. Raises ``UsageError`` for a pattern that is not a regular expression."""
    try:
        return LogFilter(tail, node, rank, re.compile(pattern or ""), raw=raw)
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from None


def logs_of(run: RunHandle, wanted: LogFilter, *, follow: bool, attempt: int | None) -> Iterator[str]:
    """Wanted lines of an attempt (the newest), of a workflow those of its steps in order."""
    for job in _jobs(run, follow):
        yield from _own_lines(job, wanted, follow, attempt)


def _jobs(run: RunHandle, follow: bool) -> Iterator[RunHandle]:
    """The run, or a workflow's steps in order; ``follow`` waits for those that are yet to begin, or begin again."""
    if run.kind != "workflow":
        yield run
        return
    for name in run.record.spec["steps"]:
        while follow and not (run.state.is_final or _is_settled(run, name)):
            time.sleep(max(_POLL_SECONDS, run.run_store.poll_seconds))
        if name in run.steps:
            yield run.steps[name]


def _is_settled(run: RunHandle, name: str) -> bool:
    """Whether the workflow's newest attempt has begun a step, or has no need to."""
    step, attempts = run.steps.get(name), run.attempts
    if step is None or not attempts:
        return False
    return has_begun_in(attempts[-1], step) or step.state.is_completed


def _own_lines(run: RunHandle, wanted: LogFilter, follow: bool, attempt: int | None) -> Iterator[str]:
    record = run.record
    numbers = [it.number for it in record.attempts]
    if attempt is not None and attempt not in numbers:
        raise UsageError(f"{run.id} has no attempt {attempt}; there are: {', '.join(map(str, numbers)) or 'none'}")
    if not numbers:
        return
    # The record comes from storage, where another release or a damaged file may have left anything.
    try:
        compute = ComputeSpec.model_validate(record.spec.get("compute"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("spec", "compute", *first["loc"])))
        raise StorageError(f"{run.uri}: its record cannot be used: {where}: {first['msg']}") from error
    yield from run.backend.logs(
        run.run_store,
        attempt or numbers[-1],
        wanted.on(compute.instance_count, compute.processes),
        lambda: follow and not run.state.is_final,
    )
