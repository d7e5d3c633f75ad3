"""Takes back the checkpoints after a step, so that a run can go on from that step as if they had never been."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.storage.find import commit_keys
from sm_llm.storage.layout import COMMITS

if TYPE_CHECKING:
    from sm_llm.storage.base import Store

RETIRED = "ckpt/retired/"


def retire_after(store: Store, step: int, *, label: str) -> list[int]:
    """Take away the commits of every step after ``step``; returns those steps, ascending.

    Each commit is first copied to ``ckpt/retired/<label>/``, for whoever wonders later; its data is then garbage that
    the collection removes in time. Newest first: a crash leaves a run that would go on from some earlier one of them,
    and the same call finishes the work. No process of the run may be alive. Raises ``StorageError``.
    """
    later = [(slot, key) for slot, key in commit_keys(store) if (slot.step or 0) > step]
    for _, key in reversed(later):
        body = store.get(key)
        if body is not None:
            store.put_if_absent(f"{RETIRED}{label}/{key.removeprefix(COMMITS)}", body)
        store.delete([key])
    return [slot.step or 0 for slot, _ in later]
