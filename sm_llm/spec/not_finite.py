"""What happens when a step's loss or gradient is NaN or infinite."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel


class NotFiniteSpec(SpecModel):
    """The update of such a step is never applied, whatever the policy, so the trained state stays finite.

    A step whose global batch has no label to learn from is one of them: ``stop`` fails, the others skip it.
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """``stop`` fails the job; ``skip`` continues with the next step; ``rollback`` goes back to the newest checkpoint,
    repeats the steps since, and skips the step if it is not finite again."""
    limit: int = Field(default=10, ge=1, le=10**12)
    """skip: fail at so many such steps in a row; rollback: fail when it would be one more than so many times."""
