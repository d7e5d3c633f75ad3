"""What is known of an attempt that ended on this machine: its nodes' files, their logs, and what torchrun saw."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from sm_llm.contract.failure import Cause, Failure, cause_in, last_error_line, one_line
from sm_llm.launcher.attempt_outcome import Evidence, failures_in_events, first_failure
from sm_llm.launcher.observe.logs import last_lines
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.runs.run_states import RunState
from sm_llm.runs.stopped import StopRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.backends.local.processes import Ended
    from sm_llm.runs.run_paths import RunPaths

_LINES = 600
# A process that a signal ended, in torchrun's own summary.
_SUMMARY = re.compile(r"\s*rank\s+: ([0-9]{1,9}) \(local_rank: [0-9]+\)\s+exitcode\s+: -([0-9]{1,4}) ")
# What torchrun sends to the others of a node once one has failed: no cause of anything.
_ASKED = (signal.SIGTERM, signal.SIGINT)


def evidence(paths: RunPaths, job: JobFile, ended: Ended, *, interrupted: bool) -> Evidence:
    """What the ended nodes of a job have left. Exit codes come last: torchrun loses those of its workers.

    ``interrupted``: whether the attempt was asked to stop before any of it failed.
    """
    nodes = len(ended.codes)
    reported = first_failure([*failures_in_events(paths, job.attempt), *_failure_files(paths, job, nodes)])
    # Before a stop: who fails while it saves on request has failed.
    if reported is not None and not reported.cause.is_consequence:
        return Evidence(RunState.FAILED, failure=reported)
    stops = [StopRecord.read(_container(paths, job, node).stopped) for node in range(nodes)]
    stop = next((record for record in stops if record is not None), None)
    if interrupted or stop is not None:
        return Evidence(RunState.STOPPED, stop.sentence if stop is not None and stop.step is not None else "")
    if ended.first_failed is None:
        return Evidence(RunState.COMPLETED)
    node = ended.first_failed
    # Only torchrun knows of a signal. A reported consequence explains less than that, and the log is the last resort.
    seen = _killed(paths, job, nodes) or reported or _in_log(paths, job, node, ended.codes[node])
    return Evidence(RunState.FAILED, seen.headline, seen.rank)


def _failure_files(paths: RunPaths, job: JobFile, nodes: int) -> Iterator[tuple[float, Failure]]:
    """``output/failure`` of every node, with its time. A script's own words are taken as they are."""
    for node in range(nodes):
        path = _container(paths, job, node).failure
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            yield path.stat().st_mtime, Failure.from_text(text)


def _killed(paths: RunPaths, job: JobFile, nodes: int) -> Failure | None:
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
    # NCCL's watchdog logs the timeout before it aborts its process.
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
