"""One attempt of one local run, from the laid-out folders to its recorded end; runs inside the supervisor."""

from __future__ import annotations

import json
import os
import re
import site
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.events import AttemptEnded, EventWriter, read_file
from sm_llm.contract.job_file import JobFile
from sm_llm.contract.liveness import hold
from sm_llm.contract.run_paths import ContainerPaths, RunPaths
from sm_llm.contract.run_record import Attempt, AttemptStart, RunRecord
from sm_llm.contract.states import RunState
from sm_llm.launcher import processes
from sm_llm.launcher.container import PORT, clear_scratch, lay_out
from sm_llm.launcher.inputs import input_manifests
from sm_llm.launcher.logs import last_lines
from sm_llm.launcher.results import has_checkpoint, has_final, link_result, result_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

GRACE_SECONDS = 5.0
"""How long the other nodes may take to notice by themselves that one has failed."""
STOP_SECONDS = 40.0
"""Time from SIGTERM to SIGKILL; torchrun itself kills its workers 30 s after SIGTERM."""
_ERROR_LINE = re.compile(r"(?:\[rank ?\d+\]:?\s*)*([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*|$))")
_RANK = re.compile(r"rank (\d+): ")
_LONGEST_CAUSE = 500


@dataclass(frozen=True)
class Ending:
    """How an attempt ended: our state, why, and the first failing rank where it is known."""

    state: RunState
    reason: str | None = None
    rank: int | None = None


def run_attempt(
    root: Path,
    interrupts: processes.Interrupts,
    *,
    environ: Mapping[str, str] = os.environ,
    on_started: Callable[[], None] = lambda: None,
) -> Ending:
    """Run the attempt that ``job.json`` and its request describe, and record how it ended.

    ``on_started`` is called once the run's lock is held and the attempt is in the record.
    """
    paths = RunPaths(root)
    job = JobFile.read(paths.job_file)
    with recorded(root, job.attempt, on_started) as record_end:
        RunRecord.update(paths.record, lambda record: with_facts(record, paths, job))
        request = json.loads(request_file(paths, job.attempt).read_text(encoding="utf-8"))
        for earlier in range(1, job.attempt):
            clear_scratch(paths, earlier)
        for node in range(len(request["nodes"])):
            lay_out(paths, job, node, request["entrypoint"])
        ended = _run_nodes(paths, job, request, interrupts, environ)
        ending = judge(paths, job, ended, interrupted=interrupts.count > 0)
        if folder := result_folder(root, job.run_id):
            link_result(root, folder)
        record_end(ending)
        clear_scratch(paths, job.attempt)
    return ending


@contextmanager
def recorded(root: Path, number: int, on_started: Callable[[], None]) -> Iterator[Callable[[Ending], None]]:
    """Hold the run's lock and keep its record true around one attempt: opened here, ended by the callable it yields.

    An error of our own ends the attempt as failed before it is raised on.
    """
    paths = RunPaths(root)
    opened = Attempt(number=number, native_id=str(os.getpid()), host=socket.gethostname(), started=time.time())

    def end(ending: Ending) -> None:
        events = EventWriter(paths.event_file(number, "launcher"), number)
        events.write(AttemptEnded(ending.state.value, ending.reason, ending.rank))
        events.close()
        RunRecord.update(paths.record, lambda record: with_ending(record, paths, number, ending))

    with hold(root):
        RunRecord.update(paths.record, lambda record: record.with_attempt(opened))
        on_started()
        try:
            yield end
        except Exception as error:
            end(Ending(RunState.FAILED, f"the launcher failed: {type(error).__name__}: {error}"))
            raise


def with_facts(record: RunRecord, paths: RunPaths, job: JobFile) -> RunRecord:
    """The record with what its open attempt was sent and is about to read."""
    opened = record.attempts[-1]
    request = request_file(paths, job.attempt).relative_to(paths.root).as_posix()
    return record.with_attempt(opened.model_copy(update={"request": request, "inputs": input_manifests(job.spec)}))


def with_ending(record: RunRecord, paths: RunPaths, number: int, ending: Ending) -> RunRecord:
    """The record with attempt ``number`` ended, where its training began, and the trackers it opened."""
    update: dict[str, Any] = {
        "ended": time.time(), "state": ending.state, "reason": ending.reason, "rank": ending.rank
    }  # fmt: skip
    trackers = dict(record.trackers)
    for event in _told(paths, number):
        if event["kind"] == "start_chosen":
            update["start"] = AttemptStart(**{name: event[name] for name in AttemptStart.model_fields})
        else:
            trackers[event["tracker"]] = event["id"]
    attempt = next(it for it in record.attempts if it.number == number)
    return record.with_attempt(attempt.model_copy(update=update)).model_copy(update={"trackers": trackers})


def _told(paths: RunPaths, number: int) -> Iterator[Mapping[str, Any]]:
    log = paths.event_file(number, "rank0")
    for _, event in read_file(log) if log.is_file() else ():
        if event["kind"] in ("start_chosen", "tracker_opened"):
            yield event


def request_file(paths: RunPaths, attempt: int) -> Path:
    """The submission's request as it was sent."""
    return paths.attempt_dir(attempt) / "request.json"


def _run_nodes(
    paths: RunPaths,
    job: JobFile,
    request: Mapping[str, Any],
    interrupts: processes.Interrupts,
    environ: Mapping[str, str],
) -> processes.Ended:
    with processes.reserved_port() as port:
        nodes = []
        for index, node in enumerate(request["nodes"]):
            argv = [part.replace(PORT, str(port)) for part in node["argv"]]
            variables = {**environ, **python_path(environ), **node["env"]}
            folder = ContainerPaths(paths.node_dir(job.attempt, index)).code
            nodes.append(processes.start(argv, variables, paths.node_log(job.attempt, index), folder))
        ended = processes.wait_for_all(nodes, interrupts, grace_seconds=GRACE_SECONDS, stop_seconds=STOP_SECONDS)
    processes.kill_descendants()
    return ended


def python_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Make this very package importable in the nodes, unless it is installed where Python looks anyway.

    A site-packages folder is never put on PYTHONPATH: there it would come before the standard library.
    """
    home = Path(__file__).resolve().parents[2]
    installed = {Path(folder).resolve() for folder in [*site.getsitepackages(), site.getusersitepackages()]}
    if home in installed or home.name == "site-packages":
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(home), environ.get("PYTHONPATH")]))}


def judge(paths: RunPaths, job: JobFile, ended: processes.Ended, *, interrupted: bool) -> Ending:
    """The state of a finished attempt. What was published decides, not exit codes: torchrun loses the workers'."""
    if has_final(paths.root, job.run_id):
        return Ending(RunState.COMPLETED)
    if interrupted:
        if has_checkpoint(paths.root, job.run_id):
            return Ending(RunState.INTERRUPTED, "asked to stop; the newest checkpoint is safe")
        return Ending(RunState.STOPPED, "asked to stop before the first checkpoint")
    if ended.first_failed is None:
        return Ending(RunState.COMPLETED_UNPUBLISHED, "ended without an error, but published no result")
    return _failure(paths, job, ended.first_failed, ended.codes)


def _failure(paths: RunPaths, job: JobFile, node: int, codes: Sequence[int]) -> Ending:
    told = [ContainerPaths(paths.node_dir(job.attempt, index)).failure for index in range(len(codes))]
    written = sorted((path for path in told if path.is_file()), key=lambda path: path.stat().st_mtime)
    if written:
        text = written[0].read_text(encoding="utf-8", errors="replace").strip()
        rank = _RANK.match(text)
        return Ending(RunState.FAILED, cause_in_text(text), int(rank[1]) if rank else None)
    cause = cause_in_log(paths.node_log(job.attempt, node))
    return Ending(RunState.FAILED, cause or f"node {node} ended with exit code {codes[node]}")


def cause_in_text(text: str) -> str:
    """One line for a failure file's text: ``rank 1: `` and the message, or a traceback's exception line."""
    if "Traceback (most recent call last)" not in text:
        return " ".join(text.split())[:_LONGEST_CAUSE]
    rank = _RANK.match(text)
    cause = _last_error_line(text.splitlines()) or "failed with a traceback"
    return f"{rank[0] if rank else ''}{cause}"[:_LONGEST_CAUSE]


def cause_in_log(log: Path) -> str | None:
    """The last exception line of a log that is not torchrun's own summary."""
    return _last_error_line(last_lines(log, 400))


def _last_error_line(lines: Sequence[str]) -> str | None:
    for line in reversed(lines):
        match = _ERROR_LINE.match(line)
        if match and "ChildFailedError" not in line:
            return match[1].strip()
    return None
