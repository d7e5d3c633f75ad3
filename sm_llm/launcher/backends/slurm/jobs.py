"""Jobs that exist: their state, how they ended, their logs, and how they are stopped."""

from __future__ import annotations

import os
import posixpath
import time
from typing import TYPE_CHECKING

from sm_llm.errors import SubmitError
from sm_llm.launcher.attempt_outcome import record_end, record_outcome, stopped
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.slurm.paths import SEPARATOR, ClusterPaths, native_id
from sm_llm.launcher.backends.slurm.states import native_state
from sm_llm.launcher.observe.logs import copied_logs
from sm_llm.owned import make_folders, opener
from sm_llm.runs.events.events import read_events
from sm_llm.runs.run_states import EXIT_CODES, RunState
from sm_llm.runs.stopped import StopRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sm_llm.launcher.backends.slurm.cluster import Cluster, Ends
    from sm_llm.launcher.backends.slurm.states import JobRow
    from sm_llm.launcher.log_filter import LogFilter
    from sm_llm.runs.run_paths import RunPaths
    from sm_llm.runs.run_record import Attempt, RunRecord
    from sm_llm.runs.run_store import RunStore

# A claim without a job after this time is taken for a submission that failed.
SUBMIT_SECONDS = 600.0
"""After its claim a launcher may still be about to submit an attempt: all its commands take no longer."""


def split_native(native_id: str) -> tuple[str, str]:
    """``HOST/JOB`` -> the host and the job's id. Raises ``SubmitError`` for anything else."""
    location, slash, job_id = native_id.rpartition("/")
    if SEPARATOR in job_id:
        raise SubmitError(f"{native_id} are the jobs of a workflow. Name the run of one of its steps")
    if not (location and slash and job_id.isascii() and job_id.isdigit()):
        raise SubmitError(f"{native_id!r} is not the id of a Slurm job. Expected HOST/JOB")
    return location, job_id


def other_job(row: JobRow, record: RunRecord, attempt: Attempt, cluster: Cluster) -> str:
    """Words for a job that has the number of an attempt's job and is another; empty for the attempt's own."""
    # Every cluster counts its jobs from 1, and "localhost" is any login node: the folder identifies the job. An
    # accounting database of an old release keeps no folder, which shows nothing.
    if not row.folder or row.folder.endswith(ClusterPaths("").attempt(record.run_id, attempt.number)):
        return ""
    return (
        f"job {row.job_id} of {cluster.transport.where} is another one, in {row.folder}. This "
        "run's job was submitted to another cluster, or before this one was set up anew: work where that is known"
    )


def attempt_folder(record: RunRecord, number: int) -> str:
    """The folder of an attempt on the cluster."""
    return ClusterPaths(str(record.spec["backend"]["shared_folder"])).attempt(record.run_id, number)


def state_of(run_store: RunStore, record: RunRecord, cluster: Cluster) -> NativeState:
    """The state of the newest attempt in ``record``. A job that has ended is settled there, once and for all.

    Slurm itself is asked, then its accounting database, then what the job left. What none of them knows is unknown.
    Raises ``NoAnswer``: nothing is known, and nothing was changed.
    """
    last = record.attempts[-1]
    job_id = split_native(last.native_id)[1]
    listed = cluster.job(job_id)
    row = listed or cluster.accounted(job_id)
    forgotten = f"Slurm no longer knows job {job_id}"
    if row is not None and (other := other_job(row, record, last, cluster)):
        row, forgotten = None, other
    # One that squeue no longer lists is not started again.
    requeues = listed is not None and record.spec["backend"].get("retry", "requeue") == "requeue"
    if row is not None and not (native := native_state(row, requeues=requeues)).state.is_final:
        return native
    folder = attempt_folder(record, last.number)
    ends = cluster.ends(folder)
    if row is None:
        # What a start left that was requeued is not the end of the job.
        if ends.outcome is None or ends.outcome.get("requeued"):
            return NativeState(RunState.UNKNOWN, f"{forgotten}, and it left no outcome in {folder}")
        native = NativeState(RunState.FAILED if ends.outcome["exit_code"] else RunState.COMPLETED)
    # The events hold the cause, so they are brought here before the attempt is judged.
    run_store.refresh(f"events/attempt-{last.number}-")
    return NativeState.of(record_end(run_store, record, *_reported(run_store.paths, last.number, native, ends)))


def state_of_claim(run_store: RunStore, record: RunRecord, cluster: Cluster) -> NativeState:
    """The state of an attempt whose launcher has not recorded its job: the job is found by its folder."""
    last = record.attempts[-1]
    row = cluster.job_in(attempt_folder(record, last.number))
    if row is not None:
        found = last.model_copy(update={"native_id": native_id(record.spec["backend"].get("ssh_host"), row.job_id)})
        # Another process may have recorded the job, or its end, in between.
        run_store.update(lambda held: held.with_attempt(found) if last.is_open_in(held) else held)
        return native_state(row)
    if abs(time.time() - last.started) < SUBMIT_SECONDS:
        return NativeState(RunState.PENDING, "its job is being submitted")
    return NativeState.of(
        record_outcome(run_store, last, stopped(run_store, record.run_id, "its job was never submitted"))
    )


def _reported(paths: RunPaths, number: int, native: NativeState, ends: Ends) -> tuple[RunState, str, str | None]:
    """State, detail and stop of an ended job. Its exit code states nothing by itself: without a node it may be 0."""
    events = (it for it in read_events(paths.events) if it["attempt"] == number and it["kind"] == "stopped")
    last = next(reversed(list(events)), None) if ends.stopped else None
    stop = StopRecord.of_event(last).sentence if last is not None else None
    state, detail = native.state, native.detail
    # After a stop in order a script ends with 0, which Slurm takes for completed, and in a workflow with a code of its
    # own, which it takes for failed.
    code = ends.outcome.get("exit_code") if ends.outcome else None
    is_own_code = state is RunState.FAILED and code == EXIT_CODES[RunState.INTERRUPTED]
    if ends.stopped and (state is RunState.COMPLETED or is_own_code):
        state, detail = RunState.STOPPED, stop or "asked to stop"
    if state is RunState.FAILED and not detail:
        node, words = min(ends.failures.items(), default=(0, ""))
        at = "" if words.startswith("node ") else f"node {node}: "
        detail = f"{at}{words}" if words else ends.last_words
    return state, detail, stop


def stop_job(record: RunRecord, attempt: Attempt, cluster: Cluster, *, now: bool) -> None:
    """Ask the processes to stop after their step; a job that waits, or with ``now`` any, is cancelled."""
    job_id = split_native(attempt.native_id)[1]
    # Asked before the request is written: a job that starts in between finds the request.
    row = cluster.job(job_id)
    if row is not None and (other := other_job(row, record, attempt, cluster)):
        raise SubmitError(other)
    cluster.put(f"{attempt_folder(record, attempt.number)}/stop", b"")  # it holds for later restarts, too
    if now or (row is not None and native_state(row).state in (RunState.PENDING, RunState.RESTARTING)):
        cluster.cancel(job_id)


def shell_command(record: RunRecord, attempt: Attempt, node: int, cluster: Cluster) -> list[str]:
    """The command that opens a shell on a node of a running job, within its allocation. Raises ``SubmitError``."""
    job_id = split_native(attempt.native_id)[1]
    row = cluster.job(job_id)
    if row is not None and (other := other_job(row, record, attempt, cluster)):
        raise SubmitError(other)
    if row is None or row.state != "RUNNING":
        state = "no longer known to Slurm" if row is None else native_state(row).detail or row.state
        raise SubmitError(f"job {job_id} is not running: it is {state}")
    names = cluster.expand(row.nodes)
    # In the order of the ranks, as the logs number nodes: one that replaces another has its rank.
    in_order = cluster.read(f"{posixpath.dirname(attempt_folder(record, attempt.number))}/nodes").strip().split(",")
    if sorted(in_order) == sorted(names):
        names = in_order
    if node >= len(names):
        raise SubmitError(f"--node must be at most {len(names) - 1}: job {job_id} runs on {', '.join(names)}")
    # Without --overlap the step would wait until the training has left a processor free.
    argv = ["srun", "--overlap", "--pty", f"--jobid={job_id}", "--nodes=1", "--ntasks=1", f"--nodelist={names[node]}"]
    return cluster.transport.interactive([*argv, "bash", "-l"])


def logs_of(
    run_store: RunStore, record: RunRecord, attempt: int, wanted: LogFilter, still_running: Callable[[], bool],
    cluster: Cluster,
) -> Iterator[str]:  # fmt: skip
    """Wanted lines of an attempt's nodes, rank 0's first, and of its script, over all restarts.

    Then new ones while ``still_running``.
    """
    copy = LogCopy(cluster, attempt_folder(record, attempt), run_store.paths.logs(attempt))
    return copied_logs(run_store.paths, attempt, wanted, copy.pull, still_running)


class LogCopy:
    """A copy of an attempt's logs in the run's folder on this machine, continued by offset."""

    def __init__(self, cluster: Cluster, source: str, folder: Path) -> None:
        self._cluster = cluster
        self._source = source
        self._folder = folder

    def pull(self) -> bool:
        """Append what is new; returns whether there was any. Raises ``NoAnswer``."""
        make_folders(self._folder)
        offsets = {path.name: path.stat().st_size for path in self._folder.glob("*.log")}
        new = self._cluster.logs(self._source, offsets)
        for name, body in new.items():
            with open(self._folder / name, "ab", opener=opener) as log:
                # Another reader of this machine may have appended the same meanwhile.
                if os.fstat(log.fileno()).st_size == offsets.get(name, 0):
                    log.write(body)
        return any(new.values())
