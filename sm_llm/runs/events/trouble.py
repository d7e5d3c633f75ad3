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
class Stacks:
    """Where all threads of one process were when the job stalled; ``step`` steps were done."""

    rank: int
    step: int
    phase: str
    text: str
    kind: str = "stacks"


@dataclass(frozen=True)
class StateVerified:
    """The state restored from the checkpoint of ``step`` has the hash it was saved with, on all processes."""

    step: int
    kind: str = "state_verified"
