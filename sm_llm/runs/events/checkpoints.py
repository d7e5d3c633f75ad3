"""The events of publications: what is published, and what is late (a part of ``runs.events.events``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointPublished:
    """A commit exists. ``blocked_seconds``: the training loop waited; ``superseded``: saves left out for this one."""

    step: int
    uri: str
    bytes: int
    seconds: float
    blocked_seconds: float
    superseded: int = 0
    kind: str = "checkpoint_published"


@dataclass(frozen=True)
class FinalPublished:
    """The task's result is published and committed."""

    uri: str
    bytes: int
    kind: str = "final_published"


@dataclass(frozen=True)
class NothingDone:
    """An attempt ended without doing anything: the run's result, at ``uri``, was published before."""

    reason: str
    uri: str
    kind: str = "nothing_done"


@dataclass(frozen=True)
class PublicationLate:
    """Publishing checkpoints lags or fails; training continues.

    ``step`` is the last one published (or that training continued from; None: none yet), ``age_seconds`` how long ago
    that was (None: since training began), ``waiting_step`` the newest save that is not published yet and
    ``superseded`` how many saves newer ones have replaced since.
    """

    step: int | None
    age_seconds: float
    waiting_step: int | None
    superseded: int
    reason: str
    kind: str = "publication_late"


@dataclass(frozen=True)
class ProfilePublished:
    """A trace of torch's profiler that begins with ``step``: open it in chrome://tracing or ui.perfetto.dev."""

    step: int
    uri: str
    bytes: int
    kind: str = "profile_published"
