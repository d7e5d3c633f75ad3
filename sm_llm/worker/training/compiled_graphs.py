"""What torch.compile has made: in the scratch folder, and in the run's storage for attempts on other machines."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.errors import StorageError
from sm_llm.owned import own_user
from sm_llm.runs.events.events import GraphsCompiled
from sm_llm.runs.run_paths import graphs_key
from sm_llm.spec.tasks import settings
from sm_llm.storage.uri import is_s3
from sm_llm.terminal import counted
from sm_llm.worker.runtime.compiler_cache import FOLDER_ENVIRONMENT, open_folder, remove_unfinished
from sm_llm.worker.versions import versions

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.publication.publish import Gather
    from sm_llm.worker.context import WorkerContext
    from sm_llm.worker.device import Device

MOST_BYTES = 256 << 20
"""Of one process's graphs; those of 32 layers of one kind take a few megabytes."""
_COUNTERS = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))
_FIELDS = frozenset({"sha256", "bytes"})


def open_graphs(
    context: WorkerContext,
    task: TrainTask,
    config: Mapping[str, Any],
    device: Device,
    environ: MutableMapping[str, str] = os.environ,
) -> CompiledGraphs | None:
    """The graphs of ``task``, whose layers are compiled, restored; None where they stay in the scratch folder.

    Every process calls it, before a graph is compiled. Raises ``RunFailed`` for a cache folder that cannot be used.
    """
    folder = open_folder(context.scratch / "compiled", environ)
    if removed := remove_unfinished(folder):
        context.notice(f"removed what a killed compiler had left half-written in {folder}: {', '.join(removed)}")
    kept = task.precision.compiled_graphs
    if not hasattr(torch.compiler, "load_cache_artifacts"):
        if kept == "storage":
            context.notice(
                f"precision.compiled_graphs: storage has no effect before torch 2.7: this is {torch.__version__}",
                "warning",
            )
        return None
    # A pickle of a folder is as good as its owner, which is checked. Of S3 nobody knows who has written it.
    if kept == "scratch" or (kept == "auto" and is_s3(context.store.uri)):
        return None
    graphs = CompiledGraphs(context, _digest(task, config, device, context.process.world_size))
    graphs.restore()
    return graphs


def _digest(task: TrainTask, config: Mapping[str, Any], device: Device, world_size: int) -> str:
    """Of all that graphs follow from. torch finds each graph by a key of its own; others would only miss."""
    follows = {
        "config": dict(config),
        "settings": settings(task),
        "precision": task.precision.model_dump(exclude={"compiled_graphs"}),
        "parallelism": task.parallelism.model_dump(),
        "seq_length": task.data.seq_length,
        "world_size": world_size,
        "device": device.name,
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(follows, sort_keys=True, default=str).encode()).hexdigest()[:32]


class CompiledGraphs:
    """Graphs of one process. They name its device, so each local rank has its own; all nodes take those of the first.

    torch keeps them as pickles, which run code when they are read. They are taken from this run's own storage alone: in
    a folder from files of this user, in S3 only where the specification asks for it. Size and hash, noted beside them,
    show that they are whole, not who wrote them.
    """

    def __init__(self, context: WorkerContext, digest: str) -> None:
        self._context = context
        self._note_key = graphs_key(digest, context.process.local_rank)
        self._file = context.scratch / f"graphs-{context.process.local_rank}.bin"
        self._before = [torch._dynamo.utils.counters[kind].copy() for kind, _ in _COUNTERS]
        self._is_restored = self._is_reported = self._is_saved = False
        self._thread: threading.Thread | None = None

    def restore(self) -> None:
        """Bring what an earlier attempt has compiled. Graphs that do not come, or are refused, cost only time."""
        try:
            if (body := self._read()) is not None:
                self._is_restored = torch.compiler.load_cache_artifacts(body) is not None
        except (StorageError, OSError, RuntimeError, ValueError) as error:
            self._context.notice(f"compiled graphs of earlier attempts were not read: {error}", "warning")
        finally:
            self._file.unlink(missing_ok=True)

    def _read(self) -> bytes | None:
        store = self._context.store
        note = store.get(self._note_key)
        if note is None:
            return None
        noted = json.loads(note)
        if not isinstance(noted, dict) or noted.keys() != _FIELDS:
            raise ValueError(f"{self._note_key} is not a note of graphs")
        digest = str(noted["sha256"])
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{self._note_key} holds no SHA-256")  # it becomes part of a key
        key = _data_key(self._note_key, digest)
        if not is_s3(store.uri):
            _assert_own(Path(store.uri) / key)
        found = store.head(key)
        if found is None or found.size != noted["bytes"] or found.size > MOST_BYTES:
            raise ValueError(f"{key} is not there, or has another size than was noted")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(key, self._file)
        body = self._file.read_bytes()
        if hashlib.sha256(body).hexdigest() != digest:
            raise ValueError(f"{key} has another hash than was noted")
        return body

    def report(self, gather: Gather) -> None:
        """After the first step, report how many graphs were found (``GraphsCompiled``). A collective."""
        if self._is_reported:
            return
        self._is_reported = True
        nodes = [it for it in gather(self._counts() if self._context.process.is_node_leader else None) if it]
        held, new, _ = (sum(it[column] for it in nodes) for column in range(3))
        if not held + new:
            return
        folder = os.environ.get(FOLDER_ENVIRONMENT, "")
        self._context.emit(GraphsCompiled(folder, held, new, 0, held / (held + new), nodes))
        source = " (carried over by the run's storage)" if self._is_restored else ""
        self._context.log(f"compiled graphs: {held} of {counted(held + new, 'graph')} from the cache{source}")

    def _counts(self) -> list[int]:
        """Graphs that the first process of this node has found and compiled since it began."""
        for (kind, name), before in zip(_COUNTERS, self._before, strict=True):
            counters = torch._dynamo.utils.counters[kind]
            hits, misses = (counters[f"{name}_{it}"] - before[f"{name}_{it}"] for it in ("hit", "miss"))
            if hits + misses:
                return [hits, misses, 0]
        return [0, 0, 0]

    def save(self) -> None:
        """Keep what is new, in the background; called once more, wait for it."""
        if self._thread is not None:
            self._thread.join()
        if self._is_restored or self._is_saved or self._context.process.node != 0:
            return
        self._is_saved = True
        kept = torch.compiler.save_cache_artifacts()
        if kept is None:
            return
        # Not waited for where a process ends early: the next attempt compiles once more.
        self._thread = threading.Thread(target=self._keep, args=(kept[0],), name="compiled-graphs", daemon=True)
        self._thread.start()

    def _keep(self, body: bytes) -> None:
        if len(body) > MOST_BYTES:
            self._context.notice(f"compiled graphs were not kept: they take {len(body) >> 20} MiB", "warning")
            return
        digest = hashlib.sha256(body).hexdigest()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_bytes(body)
            self._context.store.put_file(self._file, _data_key(self._note_key, digest))
            note = json.dumps({"sha256": digest, "bytes": len(body)})
            # Last, so that whatever is noted is whole.
            self._context.store.put_if_absent(self._note_key, note.encode())
        except (StorageError, OSError) as error:
            self._context.notice(f"compiled graphs were not kept: {error}", "warning")
        finally:
            self._file.unlink(missing_ok=True)


def _data_key(note_key: str, digest: str) -> str:
    return f"{note_key.removesuffix('.json')}-{digest[:16]}.bin"


def _assert_own(path: Path) -> None:
    """Raise ``ValueError`` for a file that somebody else has or may have written."""
    if not path.exists():
        return
    found = path.lstat()
    if found.st_uid not in {os.geteuid(), own_user(path.parent)}:
        raise ValueError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path} can be written by other users")
