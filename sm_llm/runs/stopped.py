"""output/stopped: that a job ended because it was asked to, and from where it can continue.

torchrun exits with 1 after SIGTERM whatever its workers return, so this file holds the resumable state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from sm_llm.runs.run_states import RunState
from sm_llm.storage.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class StopRecord(BaseModel):
    """How a process stopped. Written by each node's first process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    reason: str
    """Who asked, e.g. ``SIGTERM to rank 1``."""
    step: int | None = None
    """The last step that was finished, the same on all processes; None before the first."""
    checkpoint: int | None = None
    """Step of the newest committed checkpoint, from which the run continues; None if there is none."""
    detail: str = ""
    """Why no checkpoint of the last step was saved, where none was."""

    @property
    def state(self) -> RunState:
        return RunState.stopped(resumable=self.checkpoint is not None)

    @property
    def sentence(self) -> str:
        """One line for people."""
        where = "before the first step" if self.step is None else f"after step {self.step}"
        safe = "no checkpoint" if self.checkpoint is None else f"the checkpoint of step {self.checkpoint} is safe"
        return f"stopped {where} ({self.reason}); {safe}" + (f": {self.detail}" if self.detail else "")

    def write(self, path: Path) -> None:
        """Write atomically. Raises ``OSError``."""
        write_atomically(path, self.model_dump_json(indent=2) + "\n")

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> StopRecord:
        """What an event of kind ``stopped`` holds, which has the same fields."""
        return cls(**{name: event[name] for name in cls.model_fields})

    @classmethod
    def read(cls, path: Path) -> StopRecord | None:
        """None where there is no such file, or only an unreadable one."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
