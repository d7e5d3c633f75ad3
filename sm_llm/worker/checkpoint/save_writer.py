"""Writes a staged save to the node's disk and seals it: the part of a save that the store has nothing to do with."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as write_distributed
from torch.futures import Future as TorchFuture

from sm_llm.errors import CheckpointError, StorageError
from sm_llm.storage.publication import publish as publication
from sm_llm.worker.checkpoint.checkpoint_restore import files_read, layout, rank_file
from sm_llm.worker.checkpoint.shard_reader import ShardReader
from sm_llm.worker.publishing.publisher import Sealed, named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from sm_llm.storage.publication.publish import Save
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.process_info import ProcessInfo
    from sm_llm.worker.publishing.publisher import Publisher
    from sm_llm.worker.runtime.collectives import ControlGroup


_MOST_WRITERS = 8
"""Each writes about 1 GB/s to memory; disks are full before."""


class ShardWriter(FileSystemWriter):
    """A process's shards make a file for each thread that writes (``__<rank>_0``, …); whole tensors, such as a step
    count, others (``…_whole_0``).

    Else every node would fetch the large file of whichever process DCP chose to save a few bytes that all share.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        shards = [item for item in plan.items if item.type is WriteItemType.SHARD]
        whole = [item for item in plan.items if item.type is not WriteItemType.SHARD]
        apart = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}whole_")
        results: list[WriteResult] = []
        for items, storage in ((shards, plan.storage_data), (whole, apart)):
            if items:
                # DCP writes one file per call and thread under the plan's prefix; two calls with two prefixes make two.
                results += super().write_data(replace(plan, items=items, storage_data=storage), planner).wait()
        written: TorchFuture[list[WriteResult]] = TorchFuture()
        written.set_result(results)
        return written


@dataclass(frozen=True)
class SaveJob:
    """One save on its way: everything the writing thread needs, nothing that training still changes."""

    save: Save
    state: dict[str, Any]
    copied: Callable[[], None]
    """Waits until ``state`` is complete."""
    private: dict[str, Any]
    meta: dict[str, Any]
    began: float
    blocked_seconds: float | None


class SaveWriter:
    """One background thread, on every process alike, which hands what it has sealed to the publisher."""

    def __init__(self, context: WorkerContext, control: ControlGroup, publisher: Publisher) -> None:
        self._context = context
        self._background = control
        self._publisher = publisher
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        # How long the last save took to write.
        self.seconds: float | None = None
        if context.process.is_node_leader:
            context.copies.adopt()

    def submit(self, job: SaveJob) -> Future[Sealed]:
        """Write ``job`` after the one before it. The future raises what goes wrong on the node."""
        return self._thread.submit(self._named, job)

    def close(self, *, wait: bool) -> None:
        """End the thread."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _named(self, job: SaveJob) -> Sealed:
        """Background thread. A full disk is reported as what it is, whichever layer found it."""
        try:
            return self._write_and_offer(job)
        except CheckpointException as error:  # which is not an Exception
            wrapped = CheckpointError(f"the checkpoint of step {job.save.step} was not written: {error}")
            wrapped.__cause__ = error
            raise named(wrapped, job.save) from error
        except Exception as error:
            if (reported := named(error, job.save)) is not error:
                raise reported from error
            raise

    def _write_and_offer(self, job: SaveJob) -> Sealed:
        """On every rank alike."""
        began = time.perf_counter()
        sealed = self._context.copies.sealed(job.save.save_id)
        working = sealed.with_name(job.save.save_id)
        process = self._context.process
        if process.is_node_leader:
            self._context.copies.make_room()
        job.copied()
        try:
            # ``write_distributed`` is a collective: a process that failed before it would leave the others waiting in
            # it.
            self._together(lambda: _write_private(working, process.rank, job.private))
            write_distributed(
                job.state,
                # Sealing flushes them all.
                storage_writer=ShardWriter(working, thread_count=_writers(process), sync_files=False),
                process_group=self._background.group,
            )
            # What write_distributed returns lacks the places of tensors in some releases of torch, the file never.
            written = ShardReader(working).read_metadata() if process.is_leader else None
            reads = self._background.gather(files_read(job.state, self._background.broadcast(written)))
            # All processes of the node have written by now. One of them flushes and renames the folder for all.
            self._together(lambda: publication.seal(working, sealed) if process.is_node_leader else None)
        finally:
            if process.is_node_leader:
                # After a success the name is gone already; after an error half a save would fill the disk.
                shutil.rmtree(working, ignore_errors=True)
        self.seconds = time.perf_counter() - began
        meta = {**job.meta, "layout": layout(self._context), "reads": reads}
        offered = Sealed(job.save, sealed, meta, job.began, job.blocked_seconds)
        self._publisher.offer(offered, self._background)
        return offered

    def _together(self, action: Callable[[], object]) -> None:
        """Do something that may fail on one rank; if it does, all ranks raise."""
        error: Exception | None = None
        try:
            action()
        except (OSError, StorageError) as caught:
            error = caught
        # Also on processes that succeeded: a save of a part of the ranks is none.
        if problem := self._background.outcome(error):
            raise CheckpointError(f"a checkpoint could not be written: {problem}")


def _writers(process: ProcessInfo) -> int:
    """Threads of a process that write: half of its cores, for training needs some."""
    own = len(os.sched_getaffinity(0)) // process.local_world_size
    return max(1, min(_MOST_WRITERS, own // 2))


def _write_private(folder: Path, rank: int, private: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / rank_file(rank)).write_text(json.dumps(private), encoding="utf-8")
