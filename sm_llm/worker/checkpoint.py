"""Saves training state without stopping training: staged in memory, written and published by one background thread."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_distributed

from sm_llm.contract.events import CheckpointPublished
from sm_llm.contract.failure import Cause, cause_of, line_in
from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage import publish as publication
from sm_llm.storage.uri import join
from sm_llm.worker.collectives import Agreement
from sm_llm.worker.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.spec.checkpoint import CheckpointSpec
    from sm_llm.storage.base import Store
    from sm_llm.storage.publish import Published, Save
    from sm_llm.worker.context import WorkerContext

PUBLICATION_TIMEOUT = timedelta(hours=2)
"""How long the slowest node may take to store its part before the others give the job up."""


def rank_file(folder: Path, rank: int) -> Path:
    """What only one process knows, as JSON: its random state and its position in a stream."""
    return folder / f"rank-{rank:05d}.json"


@dataclass(frozen=True)
class _Job:
    """One save on its way: everything the background thread needs, nothing that training still changes."""

    save: Save
    state: dict[str, Any]
    private: dict[str, Any]
    meta: dict[str, Any]
    began: float
    blocked_seconds: float | None
    """Seconds the loop has waited; None while it waits until the end."""


class Checkpointer:
    """Exactly one save is in flight. The loop is blocked while the state is copied to host memory, not longer.

    ``save`` and ``finish`` are collectives. A save whose publication fails is given up with a warning and training
    goes on (the commit before it still stands); a second failure in a row, any failure of a required save, and any
    failure other than of storage is raised.
    """

    def __init__(self, context: WorkerContext, store: Store, spec: CheckpointSpec, control: Agreement) -> None:
        self._context = context
        self._store = store
        self._spec = spec
        self._control = control
        # The background thread's collectives must never cross those of the training loop.
        self._background = Agreement(PUBLICATION_TIMEOUT)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._staging = Staging()
        self._in_flight: Future[Published] | None = None
        self._failures = 0
        self._protected: set[int] = set()
        self._last_saved: int | None = None
        self._last_seconds: float | None = None

    @property
    def expected_seconds(self) -> float | None:
        """How long it would take to save now, from experience: the save in flight comes first. None without any."""
        return None if self._last_seconds is None else self._last_seconds * (1 if self._in_flight is None else 2)

    def protect(self, step: int) -> None:
        """Never collect the checkpoint of this step (the one that training continued from)."""
        self._protected.add(step)
        self._last_saved = step

    def save(
        self, step: int, state: dict[str, Any], private: dict[str, Any], meta: dict[str, Any], *, required: bool = False
    ) -> float:
        """Begin a save of ``step``; returns the seconds the loop was blocked.

        ``state`` are the live tensors by name, ``private`` this rank's JSON, ``meta`` goes into the commit. While an
        earlier save is still in flight after ``max_blocking_seconds``, this one is skipped and said so; a ``required``
        one waits, is published when this returns, and raises what goes wrong. A step is saved at most once.
        """
        began = time.perf_counter()
        if step == self._last_saved:
            self.finish()
            return time.perf_counter() - began
        if not self._make_room(required):
            self._context.notice(f"checkpoint of step {step} skipped: an earlier one is still in flight", "warning")
            return time.perf_counter() - began
        place = self._context.place
        save = self._control.broadcast(
            publication.new_save(
                self._context.job.run_id, step, world_size=place.world_size, node_count=place.node_count
            )
        )
        staged = self._staging.stage(state)
        waits = required or not self._spec.async_save
        blocked = None if waits else time.perf_counter() - began
        job = _Job(save, staged, private, meta, began, blocked)
        self._last_saved = step
        self._in_flight = self._thread.submit(self._named, job)
        if waits:
            self._settle(required)
        return time.perf_counter() - began

    def finish(self) -> None:
        """Wait for the save in flight; raises if it failed."""
        self._settle(required=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the save in flight, unless training failed: then other ranks may never join its collectives."""
        if kind is None:
            self.finish()
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def _make_room(self, required: bool) -> bool:
        """Wait for the save in flight, within the bound; all ranks get the same answer."""
        if self._in_flight is not None:
            wait_for([self._in_flight], timeout=None if required else self._spec.max_blocking_seconds)
        busy = self._in_flight is not None and not self._in_flight.done()
        if self._control.any(busy):
            return False
        self._settle(required=False)
        return True

    def _settle(self, required: bool) -> None:
        """Take the result of the save in flight. Every rank has the same one: publication ends with a verdict."""
        if self._in_flight is None:
            return
        future, self._in_flight = self._in_flight, None
        try:
            future.result()
            self._failures = 0
        except StorageError as error:
            self._failures += 1
            if required or self._failures > 1 or cause_of(error) is Cause.DISK_FULL:
                raise  # a full disk does not mend itself
            self._context.notice(f"{error}. Training goes on; the checkpoint before it stands", "warning")

    def _named(self, job: _Job) -> Published:
        """Background thread. A full disk is told as what it is, whichever layer found it."""
        try:
            return self._write_and_publish(job)
        except (Exception, CheckpointException) as error:  # DCP's own is no Exception
            if cause_of(error) is Cause.DISK_FULL:
                words = line_in(str(error), Cause.DISK_FULL)
                raise CheckpointError(f"disk full in the save of step {job.save.step}: {words}") from error
            if isinstance(error, CheckpointException):
                raise CheckpointError(f"the checkpoint of step {job.save.step} was not written: {error}") from error
            raise

    def _write_and_publish(self, job: _Job) -> Published:
        """On every rank alike."""
        working = self._context.scratch / "saving" / job.save.save_id
        sealed = working.with_name(f"{job.save.save_id}.sealed")
        place = self._context.place
        try:
            self._together(lambda: _write_private(working, place.rank, job.private))
            write_distributed(
                job.state,
                storage_writer=FileSystemWriter(working, sync_files=False),  # sealing flushes them all
                process_group=self._background.group,
            )
            self._together(lambda: publication.seal(working, sealed) if place.is_node_leader else None)
            published = publication.publish(
                self._store,
                job.save,
                sealed if place.is_node_leader else None,
                node=place.node,
                leader=place.is_leader,
                gather=self._background.gather,
                meta=job.meta,
            )
        finally:
            if place.is_node_leader:
                shutil.rmtree(working, ignore_errors=True)
                shutil.rmtree(sealed, ignore_errors=True)
        self._last_seconds = time.perf_counter() - job.began
        if place.is_leader:
            self._announce(job, published)
        return published

    def _together(self, action: Callable[[], object]) -> None:
        """Do something that may fail on one rank; if it does, all ranks raise."""
        error: Exception | None = None
        try:
            action()
        except (OSError, StorageError) as caught:
            error = caught
        if fault := self._background.verdict(error):
            raise CheckpointError(f"a checkpoint could not be written: {fault}")

    def _announce(self, job: _Job, published: Published) -> None:
        step = job.save.step
        assert step is not None
        if not published.won or published.commit is None:
            self._context.notice(f"checkpoint of step {step} dropped: {published.reason}", "warning")
            return
        uri = join(self._store.uri, job.save.slot.commit_key)
        seconds = time.perf_counter() - job.began
        blocked = seconds if job.blocked_seconds is None else job.blocked_seconds
        size = published.commit.size
        self._context.emit(CheckpointPublished(step, uri, size, seconds, blocked))
        self._context.say(
            f"checkpoint step {step}: {size / 2**20:.1f} MiB published in {seconds:.2f} s, "
            f"training waited {blocked:.3f} s"
        )
        self._collect()

    def _collect(self) -> None:
        """Delete what the policy does not keep. A failure leaves garbage, which the next collection finds."""
        try:
            publication.collect_garbage(
                self._store,
                run_id=self._context.job.run_id,
                keep_last=self._spec.keep_last,
                keep_every=self._spec.keep_every_steps,
                protect=self._protected,
            )
        except StorageError as error:
            self._context.notice(f"old checkpoints could not be deleted: {error}", "warning")


def _write_private(folder: Path, rank: int, private: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rank_file(folder, rank).write_text(json.dumps(private), encoding="utf-8")
