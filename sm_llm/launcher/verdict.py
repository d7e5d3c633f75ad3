"""How a finished attempt ended: from what was published, what its processes reported, and what torchrun saw."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.contract.failure import Cause, Failure, cause_in, last_error_line, one_line
from sm_llm.launcher.observe.logs import last_lines
from sm_llm.runs.events.events import event_files, read_file
from sm_llm.runs.events.trouble import Failed
from sm_llm.runs.results import has_checkpoint, has_final
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.runs.states import RunState
from sm_llm.runs.stopped import StopRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backends.local.processes import Ended
    from sm_llm.runs.run_home import RunHome
    from sm_llm.runs.run_paths import RunPaths

_LINES = 600
_FAILURE_LOG = re.compile(r"rank[0-9]+-failure")
_SUMMARY = re.compile(r"\s*rank\s+: ([0-9]{1,9}) \(local_rank: [0-9]+\)\s+exitcode\s+: -([0-9]{1,4}) ")
"""A process that a signal ended, in torchrun's own summary."""
_ASKED = (signal.SIGTERM, signal.SIGINT)
"""What torchrun sends to the others of a node once one has failed: no cause of anything."""


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: our state, why, and the first failing rank where it is known."""

    state: RunState
    reason: str | None = None
    rank: int | None = None


def judge(home: RunHome, job: JobFile, ended: Ended, *, interrupted: bool) -> Ending:
    """The state of a finished attempt. What was published decides, not exit codes: torchrun loses the workers'.

    ``interrupted``: whether it was asked to stop before any of it failed.
    """
    paths = home.paths
    if has_final(home, job.run_id):
        return completed(paths, job.attempt)
    told = told_failure(paths, job, len(ended.codes))
    stops = [StopRecord.read(_container(paths, job, node).stopped) for node in range(len(ended.codes))]
    stop = next((record for record in stops if record is not None), None)
    if told is not None and not told.cause.is_consequence:
        return _failed(told)
    if interrupted or stop is not None:
        return _stopped(home, job, stop)
    if ended.first_failed is None:
        return Ending(RunState.COMPLETED_UNPUBLISHED, "ended without an error, but published no result")
    node = ended.first_failed
    return _failed(killed(paths, job, len(ended.codes)) or told or _in_log(paths, job, node, ended.codes[node]))


def completed(paths: RunPaths, attempt: int, since: float = 0.0) -> Ending:
    """How an attempt ended whose run has a result: by its work, or without any, where the result was there before."""
    log = paths.event_file(attempt, "rank0")
    events = (event for _, event in read_file(log)) if log.is_file() else iter(())
    found = next((it for it in events if it["kind"] == "nothing_done" and it["time"] >= since), None)
    return Ending(RunState.COMPLETED) if found is None else Ending(RunState.UNCHANGED, str(found["reason"]))


def _failed(failure: Failure) -> Ending:
    return Ending(RunState.FAILED, failure.headline, failure.rank)


def _stopped(home: RunHome, job: JobFile, stop: StopRecord | None) -> Ending:
    resumable = has_checkpoint(home, job.run_id)
    state = RunState.INTERRUPTED if resumable else RunState.STOPPED
    if stop is not None and stop.step is not None:
        return Ending(state, stop.sentence)
    if resumable:
        return Ending(state, "asked to stop; the newest checkpoint is safe")
    return Ending(state, "asked to stop before the first checkpoint")


def told_failure(paths: RunPaths, job: JobFile, nodes: int) -> Failure | None:
    """The first failure that a process reported, in the event log or in its node's ``output/failure``.

    A cause comes before a consequence, then whoever was first. A script's own words are taken as they are.
    """
    found: list[tuple[bool, float, Failure]] = []
    for at, failure in failures_in_events(paths, job.attempt):
        found.append((failure.cause.is_consequence, at, failure))
    for node in range(nodes):
        path = _container(paths, job, node).failure
        if path.is_file():
            failure = Failure.from_text(path.read_text(encoding="utf-8", errors="replace").strip())
            found.append((failure.cause.is_consequence, path.stat().st_mtime, failure))
    return min(found, key=lambda item: item[:2])[2] if found else None


def failures_in_events(paths: RunPaths, attempt: int) -> Iterator[tuple[float, Failure]]:
    """Every failure that a process of an attempt has logged as an event, with its time in seconds since the epoch."""
    for number, writer, log in event_files(paths.events):
        if number == attempt and _FAILURE_LOG.fullmatch(writer):
            for event in (it for _, it in read_file(log) if it["kind"] == Failed.kind):
                cause = Cause(event["cause"]) if event["cause"] in list(Cause) else Cause.OTHER
                yield event["time"], Failure(cause, event["message"], event["rank"], event["node"])


def killed(paths: RunPaths, job: JobFile, nodes: int) -> Failure | None:
    """A process that a signal ended, as only its torchrun knows; None if there is none."""
    for node in range(nodes):
        lines = last_lines(paths.node_log(job.attempt, node), _LINES)
        for rank, number in _SUMMARY.findall("\n".join(lines)):
            if int(number) not in _ASKED:
                return _by_signal(int(rank), node, int(number), lines)
    return None


def _by_signal(rank: int, node: int, number: int, lines: list[str]) -> Failure:
    """NCCL's watchdog ends its process by SIGABRT, a broken library by SIGSEGV; their words are in the log."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    words = next((line for line in lines if cause_in(line) is Cause.COLLECTIVE_TIMEOUT), None)
    if number == signal.SIGABRT and words is not None:
        return Failure(Cause.COLLECTIVE_TIMEOUT, one_line(words), rank, node)
    remark = ". The kernel does that when the host runs out of memory" if number == signal.SIGKILL else ""
    return Failure(Cause.KILLED, f"killed by signal {number} ({name}){remark}", rank, node)


def _in_log(paths: RunPaths, job: JobFile, node: int, code: int) -> Failure:
    """The log of a node that reported nothing else: its last exception, and the rank in front of it."""
    found = last_error_line(last_lines(paths.node_log(job.attempt, node), _LINES))
    if found is None:
        return Failure(Cause.OTHER, f"node {node} ended with exit code {code}", None, node)
    return Failure(cause_in(found[0]), one_line(found[0]), found[1], node)


def _container(paths: RunPaths, job: JobFile, node: int) -> ContainerPaths:
    return ContainerPaths(paths.node_dir(job.attempt, node))
