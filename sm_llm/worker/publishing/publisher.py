"""Publishes sealed saves beside training: one at a time, at most one waits, and a newer one takes its place."""

from __future__ import annotations

import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sm_llm.contract.failure import Cause, cause_of, line_in
from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.publish import upload_part

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.publish import CommitResult, Save
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.publishing.checkpoint_age import CheckpointAge
    from sm_llm.worker.runtime.collectives import ControlGroup

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 120.0
"""Between two tries of one save; a newer save ends the pause."""


@dataclass(eq=False)
class Sealed:
    """One save on local disk. ``done`` holds the step's commit, or None if a newer save took its place."""

    save: Save
    folder: Path
    meta: dict[str, Any]
    began: float
    blocked_seconds: float | None
    """Seconds the loop has waited; None while it waits until the end."""
    done: Future[CommitResult | None] = field(default_factory=Future)
    saves: set[str] = field(default_factory=set)
    """Ids under which it was tried: no key is written twice, so every try has its own."""


@dataclass(frozen=True)
class _Reported:
    """Rank 0's decision: which save is published next, under which id; none, for good or for now."""

    key: str | None = None
    save: Save | None = None
    dropped: str | None = None
    gives_up: bool = False


def named(error: Exception, save: Save) -> Exception:
    """A full disk, reported as what it is; any other error as it is."""
    if cause_of(error) is not Cause.DISK_FULL:
        return error
    full = CheckpointError(f"disk full in the save of {save.slot}: {line_in(str(error), Cause.DISK_FULL)}")
    full.__cause__ = error
    return full


class Publisher:
    """On every process alike; ``offer`` and publication end in agreements, and what comes next is rank 0's decision.

    A publication that fails is tried again, and again by every newer save, until the oldest save that is not
    published has waited ``max_unpublished_seconds``. Disk full, and what is not a fault of storage, end it at once.
    ``failure`` then holds the reason, on all processes.
    """

    def __init__(
        self,
        context: WorkerContext,
        store: Store,
        control: ControlGroup,
        checkpoint_age: CheckpointAge,
        max_unpublished_seconds: float,
        announce: Callable[[Sealed, CommitResult], None],
    ) -> None:
        self._context = context
        self._store = store
        self._control = control
        self._checkpoint_age = checkpoint_age
        self._max_unpublished_seconds = max_unpublished_seconds
        self._announce = announce
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publication")
        self._changed = threading.Condition()
        self._held: dict[str, Sealed] = {}
        self._waiting: Sealed | None = None
        self._busy = self._closing = False
        # Whether the loop waits for what is held: then no training runs meanwhile.
        self.is_awaited = False
        self.failure: Exception | None = None
        # How long the last publication took.
        self.seconds: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is held that is not published yet."""
        with self._changed:
            return bool(self._held)

    def offer(self, sealed: Sealed, control: ControlGroup) -> None:
        """Publish a save that all nodes have sealed. A collective over ``control``, of the thread that sealed it."""
        with self._changed:
            self._held[sealed.save.save_id] = sealed
        control.barrier()  # rank 0 may have the other thread publish it from now on
        reported = control.broadcast(self._enqueue(sealed) if self._context.process.is_leader else None)
        assert reported is not None
        # The other thread gave up before this save was held, so it settled every future but this one.
        if self.failure is not None:
            self._give_up(self.failure)
        # The save that waited until now. Rank 0 chose it; all processes drop the same one.
        elif reported.dropped is not None:
            self._drop(reported.dropped)
        if reported.key is not None:
            # One worker: on a process where the loop before has not returned yet, this one follows it.
            self._thread.submit(self._run, sealed)

    def _enqueue(self, sealed: Sealed) -> _Reported:
        with self._changed:
            if not self._busy:
                self._busy = True
                return _Reported(sealed.save.save_id)
            # ``_choose`` takes what waits under the same lock: the save is either found by it or replaced here.
            dropped, self._waiting = self._waiting, sealed
            self._changed.notify_all()
            return _Reported(dropped=None if dropped is None else dropped.save.save_id)

    def end_soon(self) -> None:
        """Try nothing again: whatever fails from now on has failed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, *, wait: bool) -> None:
        """End the thread."""
        self.end_soon()
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _run(self, first: Sealed) -> None:
        current: Sealed | None = first
        try:
            tries = 0
            while current is not None:
                # Every turn is the same on all processes: one publication, which ends alike, and one decision of rank
                # 0.
                error = self._try(current)
                tries = 0 if error is None else tries + 1
                current = self._obey(self._next(current, error, tries), current, error)
        except Exception as error:  # the channel between processes broke, or we are mistaken
            self._give_up(error)

    def _try(self, sealed: Sealed) -> StorageError | None:
        """Publish once; None, or the error that all processes have."""
        if self._context.process.is_leader:
            # Before the commit: a run continues behind it, and nobody would write the events up to it once more.
            self._context.upload_events()
        process, began = self._context.process, time.perf_counter()
        sealed.saves.add(sealed.save.save_id)
        try:
            published = publication.publish(
                self._store,
                sealed.save,
                sealed.folder if process.is_node_leader else None,
                node=process.node,
                leader=process.is_leader,
                gather=self._control.gather,
                meta=sealed.meta,
                upload=partial(self._context.agent.call, upload_part),
            )
        except StorageError as error:
            return error
        # The slot holds one commit. If its id is one of ours, it is not a competitor's.
        if published.commit is not None and published.commit.save_id in sealed.saves:
            published = replace(published, won=True)  # an earlier try, whose answer was lost
        self.seconds = time.perf_counter() - began
        self._announce(sealed, published)
        self._forget(sealed, published)
        return None

    def _next(self, current: Sealed, error: StorageError | None, tries: int) -> _Reported:
        reported = self._control.broadcast(
            self._choose(current, error, tries) if self._context.process.is_leader else None
        )
        assert reported is not None
        return reported

    def _choose(self, current: Sealed, error: StorageError | None, tries: int) -> _Reported:
        """Rank 0: the waiting save; else the failed one once more, after a pause; else nothing."""
        if error is not None and self._report(error):
            return _Reported(gives_up=True)
        with self._changed:
            if error is not None:
                pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (tries - 1))
                # A newer save ends the pause: it holds more, and may succeed where this one failed.
                self._changed.wait_for(lambda: self._waiting is not None or self._closing, pause)
                if self._closing:
                    return _Reported(gives_up=True)
            chosen, self._waiting = self._waiting, None
            if chosen is not None:
                key = chosen.save.save_id
                # What failed is replaced by the newer save, so a disk never holds more than three.
                return _Reported(key, dropped=None if error is None else current.save.save_id)
            if error is None:
                # Under the lock of ``_enqueue``: a save that is offered now waits to be found here, or starts the loop
                # anew.
                self._busy = False
                return _Reported()
        process = self._context.process
        # The files are the same, the id is not: parts of the failed try can then never mix with this one's.
        again = publication.new_save(
            current.save.run_id, current.save.step, world_size=process.world_size, node_count=process.node_count
        )
        return _Reported(current.save.save_id, again)

    def _report(self, error: StorageError) -> bool:
        """Rank 0: raise the alarm; returns whether to give up."""
        waited = self._checkpoint_age.unpublished_seconds
        is_over = waited > self._max_unpublished_seconds
        gives_up = is_over or self._closing or cause_of(error) is Cause.DISK_FULL  # which does not fix itself
        alarm = self._checkpoint_age.failed(str(error))
        self._context.emit(alarm)
        age = f"{alarm.age_seconds:,.0f} s"
        last = f"none is published after {age}" if alarm.step is None else f"step {alarm.step} was published {age} ago"
        meanwhile = "The run waits for it" if self.is_awaited else "Training continues"
        outlook = "" if gives_up else f". {meanwhile}, and it is tried again"
        self._context.notice(f"{error} ({last}){outlook}", "warning")
        return gives_up

    def _obey(self, reported: _Reported, current: Sealed, error: StorageError | None) -> Sealed | None:
        if reported.gives_up:
            assert error is not None
            self._give_up(named(error, current.save))
            return None
        if reported.dropped is not None:
            self._drop(reported.dropped)
        if reported.key is None:
            return None
        with self._changed:
            # A save that is tried again is held under its new id from here on: later decisions name that one.
            chosen = self._held.pop(reported.key)
            chosen.save = reported.save or chosen.save
            self._held[chosen.save.save_id] = chosen
        return chosen

    def _give_up(self, error: Exception) -> None:
        """What is sealed stays on disk, for it is the newest there is."""
        with self._changed:
            self.failure = error
            # Futures are settled outside the lock: whoever waits for one may ask this object in turn.
            left = list(self._held.values())
            self._held.clear()
        for sealed in left:
            sealed.done.set_exception(error)

    def _drop(self, key: str) -> None:
        with self._changed:
            replaced = self._held.pop(key, None)
        if replaced is not None:  # else the other thread has just given everything up
            self._checkpoint_age.superseded(replaced.save.step or 0)
            self._settle(replaced, None)

    def _forget(self, sealed: Sealed, result: CommitResult) -> None:
        with self._changed:
            del self._held[sealed.save.save_id]
        self._settle(sealed, result)

    def _settle(self, sealed: Sealed, result: CommitResult | None) -> None:
        """The folder is moved or removed only now: its save is committed, or a newer one is sealed."""
        commit = result.commit if result is not None and result.won else None
        if self._context.process.is_node_leader:
            if commit is not None:
                # Under the id that was committed: an earlier try of the same files may have been.
                self._context.copies.keep(sealed.folder, commit.save_id)
            else:
                shutil.rmtree(sealed.folder, ignore_errors=True)
        sealed.done.set_result(result)
