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

from sm_llm.errors import CheckpointError
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
    from sm_llm.worker.strategies.base import CheckpointLibrary


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
class StagedState:
    """A state in host memory, for the writing thread; ``copied`` waits until it is complete."""

    state: dict[str, Any]
    copied: Callable[[], None]


@dataclass(frozen=True)
class Written:
    """Files that the strategy's library has written in so many seconds; ``reads`` is what this process reads of all."""

    reads: list[str]
    seconds: float


@dataclass(frozen=True)
class SaveJob:
    """One save on its way: everything the writing thread needs, nothing that training still changes."""

    save: Save
    content: StagedState | Written
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
        self._has_failed = False
        if context.process.is_node_leader:
            context.copies.adopt()

    def submit(self, job: SaveJob) -> Future[Sealed]:
        """Write ``job`` after the one before it. The future raises what goes wrong on the node."""
        return self._thread.submit(self._write_in_turn, job)

    def write_now(self, save: Save, library: CheckpointLibrary) -> Written:
        """Let the strategy's library write ``save`` in this thread, the one that trains. A collective.

        Raises ``CheckpointError``, or the error of a full disk.
        """
        began, step = time.perf_counter(), save.step
        assert step is not None
        if self._context.process.is_node_leader:
            self._context.copies.make_room()
        try:
            library.write_checkpoint(self._working(save), step)
        except (OSError, RuntimeError) as error:
            wrapped = CheckpointError(f"the checkpoint of step {step} was not written: {error}")
            wrapped.__cause__ = error
            raise named(wrapped, save) from error
        return Written(library.checkpoint_reads(step), time.perf_counter() - began)

    def _working(self, save: Save) -> Path:
        """Where a save is written before it is sealed."""
        return self._context.copies.sealed(save.save_id).with_name(save.save_id)

    def close(self, *, wait: bool) -> None:
        """End the thread."""
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _write_in_turn(self, job: SaveJob) -> Sealed:
        """Background thread. A full disk is reported as what it is, whichever layer found it."""
        # Other processes may still wait in a collective of the save that failed, and would take this one's for it.
        if self._has_failed:
            raise CheckpointError(f"the checkpoint of step {job.save.step} was not written: an earlier one failed")
        try:
            return self._write_and_offer(job)
        except CheckpointException as error:  # which is not an Exception
            self._has_failed = True
            wrapped = CheckpointError(f"the checkpoint of step {job.save.step} was not written: {error}")
            wrapped.__cause__ = error
            raise named(wrapped, job.save) from error
        except Exception as error:
            self._has_failed = True
            if (reported := named(error, job.save)) is not error:
                raise reported from error
            raise

    def _write_and_offer(self, job: SaveJob) -> Sealed:
        """On every rank alike."""
        began = time.perf_counter()
        sealed, working = self._context.copies.sealed(job.save.save_id), self._working(job.save)
        process, content = self._context.process, job.content
        try:
            # What follows are collectives: a process that failed before them would leave the others waiting.
            self._together(lambda: self._begin(job, working))
            own = self._write_state(content.state, working) if isinstance(content, StagedState) else content.reads
            reads = self._gathered_reads(job.save, own)
            # All processes of the node have written by now. One of them flushes and renames the folder for all.
            self._together(lambda: publication.seal(working, sealed) if process.is_node_leader else None)
        finally:
            if process.is_node_leader:
                # After a success the name is gone already; after an error half a save would fill the disk.
                shutil.rmtree(working, ignore_errors=True)
        self.seconds = time.perf_counter() - began + (content.seconds if isinstance(content, Written) else 0.0)
        meta = {**job.meta, "layout": layout(self._context), "reads": reads}
        offered = Sealed(job.save, sealed, meta, job.began, job.blocked_seconds)
        self._publisher.offer(offered, self._background)
        return offered

    def _begin(self, job: SaveJob, working: Path) -> None:
        """What each process does for itself: room on the disk, its copy of the state, its own file."""
        process = self._context.process
        if isinstance(job.content, StagedState):
            if process.is_node_leader:
                self._context.copies.make_room()
            job.content.copied()
        _write_private(working, process.rank, job.private)

    def _gathered_reads(self, save: Save, own: list[str]) -> list[list[str]]:
        """What every process reads of ``save``, by rank. A collective.

        Raises ``CheckpointError`` where they do not write the same one: a commit would name parts of two.
        """
        found = self._background.gather((save.save_id, own))
        if len({save_id for save_id, _ in found}) > 1:
            raise CheckpointError(f"the checkpoint of step {save.step} was not written: the processes write several")
        return [reads for _, reads in found]

    def _write_state(self, state: dict[str, Any], working: Path) -> list[str]:
        """Write ``state`` by DCP; returns the files that this process will read. A collective."""
        process = self._context.process
        write_distributed(
            state,
            # Sealing flushes them all.
            storage_writer=ShardWriter(working, thread_count=_writers(process), sync_files=False),
            process_group=self._background.group,
        )
        # What write_distributed returns lacks the places of tensors in some releases of torch, the file never.
        written = ShardReader(working).read_metadata() if process.is_leader else None
        return files_read(state, self._background.broadcast(written))

    def _together(self, action: Callable[[], object]) -> None:
        """Do something that may fail on one rank; if it does, all ranks raise."""
        error: Exception | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        # Also on processes that succeeded: a save of a part of the ranks is none.
        if problem := self._background.outcome(error):
            raise CheckpointError(f"a checkpoint could not be written: {problem}") from error


def _writers(process: ProcessInfo) -> int:
    """Threads of a process that write: half of its cores, for training needs some."""
    own = len(os.sched_getaffinity(0)) // process.local_world_size
    return max(1, min(_MOST_WRITERS, own // 2))


def _write_private(folder: Path, rank: int, private: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / rank_file(rank)).write_text(json.dumps(private), encoding="utf-8")
