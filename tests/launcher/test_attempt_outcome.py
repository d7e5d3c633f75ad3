"""How an attempt ended, from logs and files as real torchruns and workers leave them, and how that is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sm_llm.contract.failure import Cause, Failure
from sm_llm.contract.job_file import JobFile
from sm_llm.launcher.attempt_outcome import Evidence, completed, judge, record_outcome
from sm_llm.launcher.backends.local.evidence import evidence
from sm_llm.launcher.backends.local.processes import Ended
from sm_llm.runs.events.checkpoints import FinalPublished, NothingDone
from sm_llm.runs.events.event_lines import event_line
from sm_llm.runs.events.events import EventWriter, FirstStep
from sm_llm.runs.events.failures import Failed
from sm_llm.runs.outcome import Outcome, recorded_end
from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.runs.run_record import Attempt as StartedAttempt
from sm_llm.runs.run_record import RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.runs.run_store import FolderRunStore
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.job import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.runs.events.events import Event

BOTH_FAILED = Ended((1, 1), 0)
SUMMARY = """
Root Cause (first observed failure):
[0]:
  time      : 2026-11-28_01:46:39
  host      : localhost
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 16154)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 16154
"""


class Attempt:
    """The folder of an attempt of two nodes that has ended."""

    def __init__(self, root: Path) -> None:
        self.paths = RunPaths(root)
        task = {
            "kind": "train",
            "model": {"preset": "tiny"},
            "data": {"format": "synthetic", "seq_length": 8, "rows": 8},
        }
        spec = JobSpec.model_validate({"name": "v", "task": {**task, "max_steps": 4}}, strict=False)
        self.job = JobFile(run_id="v", attempt=1, run_uri=str(root), spec=spec, spec_digest="")
        for node in range(2):
            self.container(node).failure.parent.mkdir(parents=True)
            self.log(node, "")

    def container(self, node: int) -> ContainerPaths:
        return ContainerPaths(self.paths.node_dir(1, node))

    def log(self, node: int, text: str) -> None:
        path = self.paths.node_log(1, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def reported(self, rank: int, cause: Cause, message: str) -> None:
        log = EventWriter(self.paths.event_file(1, f"rank{rank}-failure"), 1)
        log.write(Failed(cause, message, rank, rank, "host", 3, ""))
        log.close()

    def judge(self, ended: Ended = BOTH_FAILED, *, interrupted: bool = False) -> Outcome:
        found = evidence(self.paths, self.job, ended, interrupted=interrupted)
        return judge(FolderRunStore(self.paths.root), self.job.run_id, self.job.attempt, found)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path / "v")


def test_OB09_of_many_ranks_the_one_with_the_cause_is_named(attempt: Attempt) -> None:
    """Only rank 5 has a traceback; the others lost it, and some of them reported that first."""
    attempt.reported(0, Cause.LOST_PEER, "RuntimeError: Connection closed by peer")
    attempt.reported(5, Cause.DEVICE_MEMORY, "torch.OutOfMemoryError: CUDA out of memory")
    outcome = attempt.judge()
    assert (outcome.state, outcome.rank) == (RunState.FAILED, 5)
    assert outcome.reason == "rank 5: out of memory on the device: torch.OutOfMemoryError: CUDA out of memory"


def test_OB09_without_any_record_the_log_is_read(attempt: Attempt) -> None:
    attempt.log(0, "[rank5]: Traceback (most recent call last):\n[rank5]: ValueError: bad row\n")
    assert attempt.judge() == Outcome(RunState.FAILED, "rank 5: ValueError: bad row", 5)


def test_a_process_that_a_signal_ended_is_the_cause_of_the_others_loss(attempt: Attempt) -> None:
    attempt.reported(0, Cause.LOST_PEER, "RuntimeError: Connection closed by peer")
    attempt.log(0, SUMMARY.format(rank=0, code=1))
    attempt.log(1, SUMMARY.format(rank=1, code=-9))
    outcome = attempt.judge()
    assert (outcome.state, outcome.rank) == (RunState.FAILED, 1)
    assert str(outcome.reason).startswith("rank 1: killed by signal 9 (SIGKILL)")


def test_what_torchrun_itself_ended_is_not_a_cause(attempt: Attempt) -> None:
    attempt.reported(0, Cause.LOST_PEER, "RuntimeError: Connection closed by peer")
    attempt.log(1, SUMMARY.format(rank=1, code=-15))
    assert attempt.judge().rank == 0


def test_an_abort_by_nccls_watchdog_is_a_timeout(attempt: Attempt) -> None:
    words = "[rank1]:[E1] [PG 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"
    attempt.log(1, f"{words}\n{SUMMARY.format(rank=1, code=-6)}")
    assert str(attempt.judge().reason).startswith("rank 1: a collective operation timed out: ")


def test_an_orderly_stop_is_reported_by_its_file_whoever_asked(attempt: Attempt) -> None:
    StopRecord(reason="SIGTERM to rank 1", step=7).write(attempt.container(1).stopped)
    attempt.reported(0, Cause.LOST_PEER, "RuntimeError: Connection closed by peer")
    for interrupted in (False, True):
        outcome = attempt.judge(interrupted=interrupted)
        assert outcome == Outcome(RunState.STOPPED, "stopped after step 7 (SIGTERM to rank 1); no checkpoint")


def test_a_failure_while_stopping_is_a_failure(attempt: Attempt) -> None:
    attempt.reported(1, Cause.DISK_FULL, "disk full in the save of step 7")
    assert attempt.judge(interrupted=True) == Outcome(RunState.FAILED, "rank 1: disk full in the save of step 7", 1)


def test_a_scripts_own_reason_is_kept(attempt: Attempt) -> None:
    attempt.container(1).failure.write_text("the tokenizer has no pad token\n")
    attempt.log(0, "ValueError: something in a log\n")
    assert attempt.judge() == Outcome(RunState.FAILED, "the tokenizer has no pad token", None)


def test_the_failure_file_of_our_worker_is_read_where_the_events_are_lost(attempt: Attempt) -> None:
    failure = Failure(Cause.DATA, "rows.jsonl line 3: no text", 1)
    attempt.container(1).failure.write_text(failure.to_text())
    assert attempt.judge() == Outcome(RunState.FAILED, "rank 1: data error: rows.jsonl line 3: no text", 1)


OWN = Failure(Cause.DATA, "row 7 is empty", 3)
LOST = Failure(Cause.LOST_PEER, "Connection closed by peer", 0)


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (Evidence(RunState.COMPLETED, stop="asked"), (RunState.COMPLETED_UNPUBLISHED, "ended without an error, but")),
        (Evidence(RunState.FAILED, "exit code 1", failure=OWN), (RunState.FAILED, "rank 3: data error: row 7 is")),
        (Evidence(RunState.FAILED, "exit code 1", failure=LOST), (RunState.FAILED, "exit code 1")),
        (Evidence(RunState.FAILED, "exit code 1", failure=LOST, stop="SIGTERM"), (RunState.STOPPED, "SIGTERM")),
        (Evidence(RunState.STOPPED, "on request", failure=OWN, stop="SIGTERM"), (RunState.STOPPED, "on request")),
        (Evidence(RunState.INTERRUPTED, "out of time"), (RunState.STOPPED, "out of time")),
        (Evidence(RunState.STOPPED), (RunState.STOPPED, "asked to stop before the first checkpoint")),
    ],
)
def test_one_rule_decides_for_every_platform(attempt: Attempt, found: Evidence, outcome: tuple[RunState, str]) -> None:
    judged = judge(FolderRunStore(attempt.paths.root), "v", 1, found)
    assert judged.state is outcome[0]
    assert str(judged.reason).startswith(outcome[1])


def test_an_end_is_settled_once_and_only_for_the_job_that_has_ended(tmp_path: Path) -> None:
    run_store = FolderRunStore(tmp_path / "v")
    spec = {"backend": {"name": "local"}, "task": {"kind": "train"}}
    run_store.create(RunRecord(run_id="v", name="v", created=1.0, spec=spec, spec_digest="d"))
    first, other = (StartedAttempt(number=1, native_id=it, started=1.0) for it in ("job-1", "job-2"))
    run_store.update(lambda held: held.with_attempt(first))
    assert recorded_end(run_store.record()) is None
    record_outcome(run_store, other, Outcome(RunState.FAILED, "of another job"))
    assert recorded_end(run_store.record()) is None
    record_outcome(run_store, first, Outcome(RunState.FAILED, "disk full", 2), bill={"billable_seconds": 7})
    record_outcome(run_store, first, Outcome(RunState.COMPLETED))
    assert recorded_end(run_store.record()) == Outcome(RunState.FAILED, "disk full", 2)
    assert run_store.record().attempts[0].billable_seconds == 7
    assert run_store.record().outcome is RunState.FAILED


def test_A1_an_attempt_that_did_nothing_has_an_outcome_of_its_own(attempt: Attempt) -> None:
    log = EventWriter(attempt.paths.event_file(1, "rank0"), 1, clock=lambda: 100.0)
    assert completed(attempt.paths, 1) == Outcome(RunState.COMPLETED)
    log.write(NothingDone("published already; there is nothing to do", "/result"))
    log.close()
    assert completed(attempt.paths, 1) == Outcome(RunState.UNCHANGED, "published already; there is nothing to do")
    assert completed(attempt.paths, 1, since=101.0) == Outcome(RunState.COMPLETED), "of an earlier job of this attempt"
    assert RunState.UNCHANGED.is_completed
    assert RunState.UNCHANGED.value == "completed-unchanged"
    assert event_line({"kind": "nothing_done", "reason": "published already"}) == "did nothing: published already"


@pytest.mark.parametrize("worked", [[FirstStep(1)], [FinalPublished("/result", 7)]], ids=["step", "result"])
def test_an_attempt_whose_processes_start_again_after_its_result_has_completed(
    attempt: Attempt, worked: list[Event]
) -> None:
    """A pod or node is lost behind the end of the training: what starts in its place finds the result."""
    log = EventWriter(attempt.paths.event_file(1, "rank0"), 1)
    again = [FinalPublished("/result", 7), NothingDone("published already", "/result")]
    for event in (*again, *again):
        log.write(event)
    assert completed(attempt.paths, 1) == Outcome(RunState.UNCHANGED, "published already")
    for event in worked:
        log.write(event)
    log.close()
    assert completed(attempt.paths, 1) == Outcome(RunState.COMPLETED)
