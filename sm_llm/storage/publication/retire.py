"""Rolls commits back, so that a run can continue without them: later ones than a step, or damaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.storage.publication.find import commit_keys, examine
from sm_llm.storage.publication.keys import COMMITS, FINAL, slot_of_commit

if TYPE_CHECKING:
    from collections.abc import Container

    from sm_llm.storage.base import Store

RETIRED = "ckpt/retired/"


def retire_after(store: Store, step: int, *, label: str) -> list[int]:
    """Take away the commits of every step after ``step``; returns those steps, ascending.

    Each commit is first copied to ``ckpt/retired/<label>/``, for whoever wonders later; its data is then garbage that
    the collection removes in time. Newest first: a crash leaves a run that continues from some earlier one of them,
    and the same call finishes the work. No process of the run may be alive. Raises ``StorageError``.
    """
    later = [(slot, key) for slot, key in commit_keys(store) if (slot.step or 0) > step]
    for _, key in reversed(later):
        _retire(store, key, label)
    return [slot.step or 0 for slot, _ in later]


def retire_all(store: Store, *, label: str) -> str:
    """Take away the result, and the commits of all steps; returns in words what there was. Raises ``StorageError``."""
    final = store.get(FINAL.commit_key) is not None
    if final:
        _retire(store, FINAL.commit_key, label)
    steps = retire_after(store, -1, label=label)
    found = [*(["its result"] if final else []), *(["steps " + ", ".join(map(str, steps))] if steps else [])]
    return " and ".join(found) or "nothing"


def retire_damaged(store: Store, steps: Container[int] | None, *, run_id: str, label: str) -> list[int]:
    """Take away the commits of ``steps`` (None: of every step), which were found damaged; returns their steps.

    Then their slots are free for the run that reaches them again. Left alone: other runs' commits, and commits that
    cannot be read, since nobody knows what they name. Raises ``StorageError``.
    """
    retired = []
    for slot, key in commit_keys(store):
        step = slot.step or 0
        found = examine(store, key, slot, run_id) if steps is None or step in steps else None
        if found is not None and found.commit is not None and not found.foreign:
            _retire(store, key, label)
            retired.append(step)
    return retired


def retired_steps(store: Store) -> set[int]:
    """Steps whose checkpoints were quarantined at some time. Raises ``StorageError``."""
    names = (found.key.rpartition("/")[2] for found in store.list(RETIRED))
    slots = (slot_of_commit(f"{COMMITS}{name}") for name in names)
    return {slot.step for slot in slots if slot is not None and slot.step is not None}


def bring_back(store: Store, *, label: str) -> None:
    """Undo the retirements under ``label``, before anything continued without them. Raises ``StorageError``."""
    folder = f"{RETIRED}{label}/"
    for found in store.list(folder):
        key = COMMITS + found.key.removeprefix(folder)
        if slot_of_commit(key) is None:
            continue  # nothing of ours
        body = store.get(found.key)
        if body is not None:
            store.put_if_absent(key, body)
        store.delete([found.key])


def _retire(store: Store, key: str, label: str) -> None:
    body = store.get(key)
    if body is not None:
        # Copied first. A call that repeats one that crashed finds the copy there and deletes the commit.
        store.put_if_absent(f"{RETIRED}{label}/{key.removeprefix(COMMITS)}", body)
    store.delete([key])
