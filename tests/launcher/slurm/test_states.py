"""Slurm's states in our words."""

from __future__ import annotations

import pytest

from sm_llm.launcher.backends.slurm.states import STATES, JobRow, native_state
from sm_llm.runs.run_states import RunState

SLURMS = {
    *("PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "CONFIGURING", "COMPLETING", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT"),
    *("STAGE_OUT", "STOPPED"),
}
"""squeue's manual, "Job state codes"."""


def test_every_state_of_the_manual_is_known() -> None:
    assert SLURMS - set(STATES) == set()


@pytest.mark.parametrize(
    ("state", "ours"),
    [
        ("RUNNING", RunState.RUNNING),
        ("COMPLETED", RunState.COMPLETED),
        ("FAILED", RunState.FAILED),
        ("NODE_FAIL", RunState.FAILED),
        ("OUT_OF_MEMORY", RunState.FAILED),
        ("TIMEOUT", RunState.INTERRUPTED),
        ("CANCELLED", RunState.STOPPED),
        ("CANCELLED by 1000", RunState.STOPPED),
        ("CANCELLED+", RunState.STOPPED),
        ("PREEMPTED", RunState.RESTARTING),
        ("REQUEUED", RunState.RESTARTING),
        ("RD", RunState.UNKNOWN),
        ("BRAND_NEW", RunState.UNKNOWN),
    ],
)
def test_SL11_SL17_states(state: str, ours: RunState) -> None:
    assert native_state(JobRow("1", state)).state is ours


def test_SL17_an_unknown_state_is_shown_raw() -> None:
    assert native_state(JobRow("1", "BRAND_NEW")).detail == "BRAND_NEW"


@pytest.mark.parametrize(
    ("row", "state", "words"),
    [
        (JobRow("1", "PENDING", "Resources"), RunState.PENDING, "waiting for resources (Resources)"),
        (JobRow("1", "PENDING", "Priority", start_time="N/A"), RunState.PENDING, "waiting for resources (Priority)"),
        (
            JobRow("1", "PENDING", "QOSMaxCpuPerUser"),
            RunState.PENDING,
            "waiting for quota (QOSMaxCpuPerUser)",
        ),
        (JobRow("1", "PENDING", "AssocGrpGRES"), RunState.PENDING, "waiting for quota (AssocGrpGRES)"),
        (JobRow("1", "PENDING", "Dependency"), RunState.PENDING, "waiting for other jobs (Dependency)"),
        (
            JobRow("1", "PENDING", "JobHeldUser"),
            RunState.PENDING,
            "held (JobHeldUser): scontrol release 1 lets it start",
        ),
        (
            JobRow("1", "PENDING", "launch failed requeued held", 2),
            RunState.PENDING,
            "held (launch failed requeued held): scontrol release 1 lets it start",
        ),
        (
            JobRow("1", "PENDING", "BeginTime", 1, "2026-11-29T07:48:02"),
            RunState.RESTARTING,
            "requeued (waiting for its begin time, starts at 2026-11-29T07:48:02)",
        ),
        (JobRow("1", "RUNNING", nodes="node[1-2]"), RunState.RUNNING, "running on node[1-2]"),
        (JobRow("1", "COMPLETING", nodes="node[1-2]"), RunState.RUNNING, "ending"),
    ],
    ids=lambda it: it.reason or it.state if isinstance(it, JobRow) else "",
)
def test_what_a_job_waits_for(row: JobRow, state: RunState, words: str) -> None:
    found = native_state(row)
    assert (found.state, found.detail) == (state, words)
