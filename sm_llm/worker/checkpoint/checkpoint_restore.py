"""Which files of a checkpoint a process reads, and what of them each node fetches."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.contract.identity import IDENTITY
from sm_llm.errors import CheckpointError
from sm_llm.runs.events.events import Progress
from sm_llm.storage.publication.restore import fetch

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.storage.base import Store
    from sm_llm.storage.publication.manifest import CommitManifest, FileEntry
    from sm_llm.worker.context import WorkerContext

_METADATA = ".metadata"


def rank_file(rank: int) -> str:
    """The file of what only one process knows, as JSON: its random state and its position in a stream."""
    return f"rank-{rank:05d}.json"


def files_read(state: dict[str, Any], metadata: Any) -> list[str]:
    """The files in which DCP finds this process's part of ``state``, by the metadata of a save of it."""
    # torch's own planner, and not a guess by file names: it decides what ``load`` will open.
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

    items = create_default_local_load_plan(state, metadata).items
    return sorted({metadata.storage_data[item.storage_index].relative_path for item in items})


def layout(context: WorkerContext) -> dict[str, Any]:
    """What decides how state is spread over processes: of equal layouts, each process reads what it read before."""
    import torch

    # torch's version counts because its releases may place the same tensors in other files.
    parallelism = context.job.spec.model_dump(mode="json")["task"].get("parallelism")
    return {"world_size": context.process.world_size, "torch": str(torch.__version__), "parallelism": parallelism}


@dataclass(frozen=True)
class Wanted:
    """Chooses files by path, or by their folder, which ends with "/". Unlike a closure, it can be sent to another
    process."""

    paths: frozenset[str]

    def __call__(self, entry: FileEntry) -> bool:
        return entry.path in self.paths or f"{entry.path.rpartition('/')[0]}/" in self.paths


def wanted_by_node(context: WorkerContext, commit: CommitManifest) -> Wanted | None:
    """The files that this node's processes read; None, all, if their state was spread in another way."""
    reads, process = commit.meta.get("reads"), context.process
    if reads is None or commit.meta.get("layout") != layout(context):
        return None
    # A commit is read from a store that others may write to: its form is checked before it is used as one.
    if not _is_of_all_ranks(reads, process.world_size):
        raise CheckpointError(f"step {commit.step}: its commit does not name the files that each process reads")
    # Ranks of a node are consecutive (torchrun).
    first = process.rank - process.local_rank
    ranks = range(first, first + process.local_world_size)
    paths = {rank_file(rank) for rank in ranks} | {path for rank in ranks for path in reads[rank]}
    return Wanted(frozenset(paths | {_METADATA}))


def check_meta(commit: CommitManifest) -> None:
    """Raise ``CheckpointError`` where a commit's ``meta`` has not the form in which workers write it."""
    meta = commit.meta
    layout_ = meta.get("layout")
    inside = layout_.get("parallelism") if isinstance(layout_, dict) else None
    identity = meta.get(IDENTITY)
    kinds = identity.items() if isinstance(identity, dict) else ()
    blocks = {
        "layout": layout_,
        "layout.parallelism": inside,
        **{it: meta.get(it) for it in ("job", "plateau", IDENTITY)},
        **{f"{IDENTITY}.{kind}": values for kind, values in kinds},
    }
    if wrong := [name for name, value in blocks.items() if value is not None and not isinstance(value, dict)]:
        raise CheckpointError(f"step {commit.step}: meta.{wrong[0]} of its commit must be a mapping")


def _is_of_all_ranks(reads: Any, world_size: int) -> bool:
    lists = isinstance(reads, list) and len(reads) == world_size and all(isinstance(it, list) for it in reads)
    return lists and all(isinstance(path, str) for paths in reads for path in paths)


class Fetcher:
    """Brings the node's files of a commit: by its transfer agent, verified, and not again what is there already."""

    def __init__(self, context: WorkerContext, store: Store) -> None:
        self._context = context
        self._store = store
        self.seconds = 0.0
        # Bytes that lay on this node's disk and were right.
        self.local_bytes = 0
        self.fetched_bytes = 0

    def __call__(self, commit: CommitManifest, folder: Path) -> None:
        """Bring the files of ``commit`` to ``folder``. Raises as ``fetch`` does."""
        check_meta(commit)
        context, began = self._context, time.perf_counter()
        # The disk needs to hold one checkpoint.
        context.copies.keep_only(folder.name)
        select = wanted_by_node(context, commit)
        total = sum(it.size for it in commit.files if select is None or select(it))
        counts: list[int] = []

        def count(increment: int) -> None:
            counts.append(increment)
            context.emit(Progress("restore", sum(counts), total, "bytes", f"step {commit.step}"))

        marker = folder.with_name(f"{folder.name}.verified")
        context.agent.call(fetch, self._store, commit, folder, select=select, marker=marker, progress=count)
        # ``fetch`` counts first what is there.
        self.local_bytes = counts[0]
        self.fetched_bytes = total - self.local_bytes
        self.seconds = time.perf_counter() - began
