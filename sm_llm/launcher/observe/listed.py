"""One run as ``sm-llm ls`` lists it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.runs.events.run_metrics import to_json

if TYPE_CHECKING:
    from sm_llm.runs.run_states import RunState


@dataclass(frozen=True)
class Listed:
    """One run of a storage root. Times in seconds since the epoch; ``ended`` is None while it runs."""

    run_id: str
    uri: str
    kind: str
    state: RunState
    reason: str | None = None
    attempts: int = 0
    created: float | None = None
    started: float | None = None
    """When the newest attempt began."""
    ended: float | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values; a loss that is not a number, which JSON lacks, is text."""
        return to_json(asdict(self))
