"""The events of a job that stops, fails, stalls or continues (a part of ``runs.events.events``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stopped:
    """All processes stopped after ``step`` because ``reason`` asked them to; ``checkpoint`` is where it continues."""

    step: int
    reason: str
    checkpoint: int | None
    detail: str = ""
    kind: str = "stopped"


@dataclass(frozen=True)
class Failed:
    """A process failed, the first of all to do so: a ``contract.failure.Failure``."""

    cause: str
    message: str
    rank: int | None
    node: int | None
    host: str
    step: int | None
    traceback: str
    kind: str = "failed"


@dataclass(frozen=True)
class Stalled:
    """No step for ``seconds`` (a step takes ``median_seconds``), or no sign of life from the ``silent`` ranks.

    ``behind`` are ranks that are alive and have come less far than the others.
    """

    seconds: float
    median_seconds: float | None
    silent: list[int]
    behind: list[int]
    detail: str
    kind: str = "stalled"


@dataclass(frozen=True)
class StacksCollected:
    """Where all threads of one process were when the job stalled; ``step`` steps were done."""

    rank: int
    step: int
    phase: str
    text: str
    kind: str = "stacks"


@dataclass(frozen=True)
class CheckpointRestored:
    """All nodes have the files of the checkpoint of ``step``; the slowest took ``seconds``.

    ``local_bytes`` lay on the nodes' own disks and were compared with the commit, ``fetched_bytes`` came from storage.
    """

    step: int
    seconds: float
    local_bytes: int
    fetched_bytes: int
    kind: str = "checkpoint_restored"


@dataclass(frozen=True)
class Recovered:
    """Training continues after a start that was broken off: ``step`` is the first one completed since.

    ``seconds`` run from the last sign of life of the earlier start to the end of that step. The parts are known as far
    as the scheduler states when it queued the job again and when it started it: ``detection_seconds`` until the former,
    ``requeue_seconds`` until the latter; together ``down_seconds``, which ends where the worker begins if the scheduler
    states nothing. Then ``start_seconds`` until the checkpoint is restored in ``restore_seconds``, and
    ``first_step_seconds``.
    """

    step: int
    seconds: float
    down_seconds: float
    detection_seconds: float | None
    requeue_seconds: float | None
    start_seconds: float
    restore_seconds: float
    first_step_seconds: float
    kind: str = "recovered"


@dataclass(frozen=True)
class StateVerified:
    """The state restored from the checkpoint of ``step`` has the hash it was saved with, on all processes."""

    step: int
    kind: str = "state_verified"
