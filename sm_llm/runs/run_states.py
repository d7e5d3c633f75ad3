"""The closed table of run states and exit codes, the same for every backend."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """What a run is doing, in the words every backend's own states are mapped to."""

    PENDING = "pending"
    RUNNING = "running"
    RESTARTING = "restarting"
    COMPLETED = "completed"
    UNCHANGED = "completed-unchanged"
    """Completed, and the newest attempt did nothing: the result was published before."""
    COMPLETED_UNPUBLISHED = "completed-unpublished"
    INTERRUPTED = "interrupted-resumable"
    FAILED = "failed"
    STOPPED = "stopped"
    UNKNOWN = "unknown"

    @classmethod
    def stopped(cls, *, resumable: bool) -> RunState:
        """The state of what ended on request: ``resumable`` where there is a checkpoint to continue from."""
        return cls.INTERRUPTED if resumable else cls.STOPPED

    @property
    def is_completed(self) -> bool:
        """Whether the run has its result."""
        return self in (RunState.COMPLETED, RunState.UNCHANGED)

    @property
    def is_final(self) -> bool:
        return self not in (RunState.PENDING, RunState.RUNNING, RunState.RESTARTING, RunState.UNKNOWN)


EXIT_CODES: dict[RunState, int] = {
    RunState.COMPLETED: 0,
    RunState.UNCHANGED: 0,
    RunState.FAILED: 1,
    RunState.COMPLETED_UNPUBLISHED: 3,
    RunState.STOPPED: 4,
    RunState.INTERRUPTED: 75,  # EX_TEMPFAIL of sysexits.h: try the same command again
}
"""Exit code of ``sm-llm fit`` and of a worker for each final state."""

USAGE_EXIT_CODE = 2

EXIT_MEANINGS: dict[int, str] = {
    0: "done: the run has its result, or was left in the background",
    1: "failed; of other verbs: an error, in one line",
    USAGE_EXIT_CODE: "wrong usage, specification or plan, no such run, or one that cannot continue like this",
    3: "trained, but the result was not published: the verb finish publishes it",
    4: "stopped before there was a checkpoint",
    75: "interrupted and resumable: the same command continues it",
}
"""What an exit code means, for every verb."""
