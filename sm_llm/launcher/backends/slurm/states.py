"""Slurm's states in our words: pending and why, requeued until when, lost nodes, time limits."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sm_llm.launcher.backend import NativeState
from sm_llm.runs.run_states import RunState

_PENDING = (RunState.PENDING, "")
_REQUEUED = (RunState.RESTARTING, "requeued")

STATES: dict[str, tuple[RunState, str]] = {
    "PENDING": _PENDING,
    "CONFIGURING": (RunState.PENDING, "its nodes are starting"),
    "RUNNING": (RunState.RUNNING, ""),
    "COMPLETING": (RunState.RUNNING, "ending"),
    "RESIZING": (RunState.RUNNING, "resizing"),
    "SIGNALING": (RunState.RUNNING, "being signalled"),
    "STAGE_OUT": (RunState.RUNNING, "staging files out"),
    "STOPPED": (RunState.RUNNING, "suspended by a signal; its nodes are kept"),
    "SUSPENDED": (RunState.RUNNING, "suspended; its nodes are given to others"),
    "REQUEUED": _REQUEUED,
    "REQUEUE_FED": _REQUEUED,
    "PREEMPTED": (RunState.RESTARTING, "preempted"),
    "REQUEUE_HOLD": (RunState.PENDING, "requeued and held: scontrol release JOB lets it start"),
    "RESV_DEL_HOLD": (RunState.PENDING, "held, because its reservation was deleted"),
    "SPECIAL_EXIT": (RunState.PENDING, "requeued and held after a special exit: scontrol release JOB lets it start"),
    "COMPLETED": (RunState.COMPLETED, ""),
    "CANCELLED": (RunState.STOPPED, "cancelled"),
    "TIMEOUT": (RunState.INTERRUPTED, "the time limit was reached"),
    "DEADLINE": (RunState.INTERRUPTED, "the deadline was reached"),
    "NODE_FAIL": (RunState.FAILED, "a node failed"),
    "BOOT_FAIL": (RunState.FAILED, "a node did not start"),
    "LAUNCH_FAILED": (RunState.FAILED, "the job could not be launched on its nodes"),
    "RECONFIG_FAIL": (RunState.FAILED, "a node could not be reconfigured"),
    "OUT_OF_MEMORY": (RunState.FAILED, "a node's memory was used up"),
    "FAILED": (RunState.FAILED, ""),
    "REVOKED": (RunState.STOPPED, "another cluster of the federation has started it"),
}
"""Slurm's base states and flags -> our state and words. What is not here is shown raw."""
_HELD = re.compile("hold|held", re.IGNORECASE)

_QUOTA = ("QOS", "Assoc", "Licenses", "PartitionTimeLimit", "PartitionNodeLimit", "AccountNotAllowed")
_RESOURCES = ("Resources", "Priority", "Nodes", "ReqNodeNotAvail", "Reservation", "NodeDown", "PartitionDown")


@dataclass(frozen=True)
class JobRow:
    """One job as ``squeue`` or ``sacct`` lists it."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    start_time: str = ""
    """When it is expected to start, or has started, in the cluster's own time."""
    nodes: str = ""
    comment: str = ""
    folder: str = ""
    """Where its script works."""


def native_state(row: JobRow, *, requeues: bool = True) -> NativeState:
    """The state of a job. A job that has run and is waiting again is restarting.

    ``requeues`` is whether Slurm may start it again: to be preempted is the end of any other.
    """
    base = row.state.partition(" ")[0].rstrip("+")  # sacct writes "CANCELLED by 1000", and cuts long names
    if base not in STATES:
        return NativeState(RunState.UNKNOWN, row.state)
    state, words = STATES[base]
    if base == "PREEMPTED" and not requeues:
        return NativeState(RunState.INTERRUPTED, words)
    if base == "PENDING":
        # One that is held waits for a person, whether it has run before or not.
        if row.restarts and not _HELD.search(row.reason):
            return NativeState(RunState.RESTARTING, f"requeued ({_waits(row)})")
        return NativeState(state, _waits(row))
    if base == "CANCELLED" and row.reason.startswith("Dependency"):
        return NativeState(state, "cancelled: a job that it waits for has failed")
    if base in ("SUSPENDED", "STOPPED", "COMPLETING") or state is not RunState.RUNNING:
        return NativeState(state, words)
    return NativeState(state, f"{words or 'running'} on {row.nodes}" if row.nodes else words)


def _waits(row: JobRow) -> str:
    starts = "" if row.start_time in ("", "N/A", "Unknown") else f", starts at {row.start_time}"
    if row.reason == "BeginTime":
        return f"waiting for its begin time{starts}"
    if _HELD.search(row.reason):
        return f"held ({row.reason}): scontrol release {row.job_id} lets it start"
    if row.reason.startswith("Dependency"):
        return f"waiting for other jobs ({row.reason})"
    if row.reason.startswith(_QUOTA):
        return f"waiting for quota ({row.reason})"
    if row.reason.startswith(_RESOURCES):
        return f"waiting for resources ({row.reason}){starts}"
    return f"waiting ({row.reason or 'no reason was given'}){starts}"
