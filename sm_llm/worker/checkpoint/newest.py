"""From where a run would continue, as far as storage shows at this moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.errors import SmLlmError
from sm_llm.storage.publication.publish import find_newest

if TYPE_CHECKING:
    from sm_llm.storage.base import Store


def newest_step(store: Store, run_id: str) -> int | None:
    """The newest committed step of a run; None without one, or if that cannot be seen now."""
    try:
        commit = find_newest(store, run_id=run_id).commit
    # Asked while a process ends: the report of a stop lacks a step then, but the stop itself must not fail.
    except SmLlmError:
        return None
    return None if commit is None else commit.save.step
