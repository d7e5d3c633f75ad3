"""Garbage collection: what no commit needs any more goes, commit objects first, data after."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.storage.publication.find import Examined, commit_keys, examine
from sm_llm.storage.publication.keys import COMMITS, FINAL, Slot, save_of_key, slot_of_commit
from sm_llm.storage.publication.pins import pinned
from sm_llm.storage.stored_names import report_unknown, usable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from sm_llm.storage.base import Store, StoredObject

HOUR = 3600.0


@dataclass(frozen=True)
class Collected:
    """What was deleted: ``steps`` of checkpoints, ``orphans`` (saves nobody committed), bytes; or why nothing was."""

    steps: tuple[int, ...] = ()
    orphans: tuple[str, ...] = ()
    size: int = 0
    refused: str = ""


def collect_garbage(
    store: Store,
    *,
    run_id: str,
    keep_last: int,
    keep_every: int | None = None,
    protect: Collection[int] = (),
    live: Collection[str] = (),
    min_age_seconds: float = HOUR,
    clock: Callable[[], float] | None = None,
) -> Collected:
    """Delete checkpoints that the policy does not keep, and old saves that were never committed.

    Kept are the newest ``keep_last`` valid checkpoints, those whose step is a multiple of ``keep_every``, the steps in
    ``protect`` (the one training resumed from), and what another run has pinned to begin from. Only valid checkpoints
    count. Another run's commits, and commits that cannot be read, are left alone together with every save of their
    step. An orphan goes only if its slot is not newer than the newest valid commit, it is not in ``live`` (ids of saves
    in flight) and its youngest object is older than ``min_age_seconds``. Time is the store's own: that of the youngest
    commit, unless ``clock`` is given, so that a node whose clock is wrong does no harm. Uploads nobody finished
    go at the same age.

    Rank 0 calls it after a commit; a crash inside it leaves garbage, never a commit without data. Raises
    ``StorageError`` if the store does not answer; before that only what is named above was deleted.
    """
    found = _examine_all(store, run_id)
    valid = sorted({it.slot.step or 0 for it in found if it.problem is None})
    kept = _kept(valid, keep_last, keep_every, protect)
    now = clock() if clock is not None else _store_time(store)
    doomed = [it for it in found if _is_doomed(it, kept, valid)]
    if doomed and (refused := _recheck(store, run_id, valid, kept, keep_last)):
        return Collected(refused=refused)
    # As late as possible: a branch may have pinned a checkpoint since this call began.
    wanted = pinned(store, now) if doomed else set()
    doomed = [it for it in doomed if it.slot.step not in wanted]
    # All commits before any data: a crash in between leaves garbage, and never a commit without its data.
    for item in doomed:
        store.delete([item.key])
    sizes = [_delete_save(store, item) for item in doomed]
    orphans, orphan_size = _delete_orphans(store, run_id, live, min_age_seconds, now)
    store.abort_unfinished(now - min_age_seconds)
    steps = tuple(sorted({item.slot.step or 0 for item in doomed}))
    return Collected(steps, orphans, sum(sizes) + orphan_size)


def _store_time(store: Store) -> float:
    # Rank 0 collects right after a commit, so the youngest commit's time stands for now.
    commits = (it for it in store.list(COMMITS) if slot_of_commit(it.key) is not None)
    return max((it.modified or 0.0 for it in commits), default=0.0)


def _examine_all(store: Store, run_id: str) -> list[Examined]:
    examined = (examine(store, key, slot, run_id) for slot, key in commit_keys(store))
    return [it for it in examined if it is not None]


def _kept(valid: Sequence[int], keep_last: int, keep_every: int | None, protect: Collection[int]) -> set[int]:
    kept = set(valid[-keep_last:]) | (set(valid) & set(protect))
    if keep_every is not None:
        kept |= {step for step in valid if step % keep_every == 0}
    return kept


def _is_doomed(item: Examined, kept: set[int], valid: Sequence[int]) -> bool:
    """Superseded checkpoints of this run, and proven damage older than a valid one; never what we cannot judge."""
    if item.commit is None or item.foreign or not valid or item.commit.step != item.slot.step:
        return False
    step = item.slot.step or 0
    return step not in kept and step < valid[-1]


def _recheck(store: Store, run_id: str, valid: Sequence[int], kept: set[int], keep_last: int) -> str:
    """Look again right before deleting: why it is not safe, or the empty string."""
    still = {it.slot.step for it in _examine_all(store, run_id) if it.problem is None and it.slot.step in kept}
    wanted = min(keep_last, len(valid))
    if len(still) < wanted:
        return f"only {len(still)} complete checkpoints would remain, {wanted} are to be kept"
    return ""


def _delete_save(store: Store, item: Examined) -> int:
    assert item.commit is not None
    objects = store.list(item.slot.save_prefix(item.commit.save_id))
    store.delete(usable((it.key for it in objects), store.uri))
    return sum(it.size for it in objects)


def _delete_orphans(
    store: Store, run_id: str, live: Collection[str], min_age_seconds: float, now: float
) -> tuple[tuple[str, ...], int]:
    # Examined anew: the commits deleted above name their saves no longer, and a new one may have come.
    found = _examine_all(store, run_id)
    final = examine(store, FINAL.commit_key, FINAL, run_id)
    found += [final] if final is not None else []
    # Such a commit may name any save of its slot.
    untouchable = {it.slot for it in found if it.commit is None or it.foreign}
    named = {it.commit.save_id for it in found if it.commit is not None}
    newest = max((it.slot.step for it in found if it.problem is None and it.slot.step is not None), default=-1)
    has_final = final is not None and final.problem is None

    def is_orphan(slot: Slot, save_id: str, objects: Sequence[StoredObject]) -> bool:
        # A save of a slot beyond the newest valid commit may still be committed.
        passed = has_final if slot.step is None else slot.step <= newest
        # An object without a time counts as new.
        age = now - max(it.modified or now for it in objects)
        unknown = slot not in untouchable and save_id not in named and save_id not in live
        kept = any(it.key == slot.kept_key(save_id) for it in objects)
        return passed and unknown and not kept and age > min_age_seconds

    gone, size = [], 0
    for (slot, save_id), objects in _saves(store).items():
        if is_orphan(slot, save_id, objects):
            store.delete(usable((it.key for it in objects), store.uri))
            gone.append(save_id)
            size += sum(it.size for it in objects)
    return tuple(gone), size


def _saves(store: Store) -> dict[tuple[Slot, str], list[StoredObject]]:
    saves: dict[tuple[Slot, str], list[StoredObject]] = defaultdict(list)
    unknown = []
    for item in (*store.list("ckpt/step-"), *store.list(FINAL.prefix)):
        if save := save_of_key(item.key):
            saves[save[0], save[1]].append(item)
        else:
            unknown.append(item.key)
    report_unknown(store.uri, unknown)
    return saves
