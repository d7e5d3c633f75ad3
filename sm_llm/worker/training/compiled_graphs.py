"""What torch.compile has made: in the scratch folder, and in the run's storage for attempts on other machines."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.errors import StorageError
from sm_llm.owned import own_user
from sm_llm.runs.events.events import GraphsCompiled
from sm_llm.runs.run_paths import graphs_prefix
from sm_llm.spec.tasks import settings
from sm_llm.storage.base import MissingObjectError
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
_WHOLE = ".whole"


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
    a folder from files of this user, in S3 only where the specification asks for it. The hash in their name shows that
    they are whole, not who wrote them.
    """

    def __init__(self, context: WorkerContext, digest: str) -> None:
        self._context = context
        self._prefix = graphs_prefix(digest, context.process.local_rank)
        self._file = context.scratch / f"graphs-{context.process.local_rank}.bin"
        self._before = [torch._dynamo.utils.counters[kind].copy() for kind, _ in _COUNTERS]
        self._unused: list[str] = []
        self._is_restored = self._is_reported = self._is_saved = False
        self._thread: threading.Thread | None = None

    def restore(self) -> None:
        """Bring what an earlier attempt has compiled. Graphs that do not come, or are refused, cost only time."""
        try:
            keys = [it.key for it in self._context.store.list(self._prefix)]
            whole = [it.removesuffix(_WHOLE) for it in keys if it.endswith(_WHOLE)]
            # All nodes take the first that can be read; whatever else is there is replaced by ``save``.
            used = next((it for it in whole if self._is_loaded(it)), None)
            self._is_restored = used is not None
            self._unused = [it for it in keys if used is None or it not in _keys(used)]
        except (StorageError, OSError) as error:
            self._context.notice(f"compiled graphs of earlier attempts were not read: {error}", "warning")
        finally:
            self._file.unlink(missing_ok=True)

    def _is_loaded(self, name: str) -> bool:
        try:
            if torch.compiler.load_cache_artifacts(self._read(name)) is not None:
                return True
            raise ValueError(f"torch {torch.__version__} does not read {name}")
        except (MissingObjectError, RuntimeError, ValueError) as error:
            self._context.notice(
                f"compiled graphs of earlier attempts were not read, and are replaced: {error}", "warning"
            )
            return False

    def _read(self, name: str) -> bytes:
        store, (data, _) = self._context.store, _keys(name)
        if not is_s3(store.uri):
            _assert_own(Path(store.uri) / data)
        found = store.head(data)
        if found is not None and found.size > MOST_BYTES:
            raise ValueError(f"{data} is larger than any that is kept")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        store.get_file(data, self._file)
        body = self._file.read_bytes()
        if hashlib.sha256(body).hexdigest() != name.removeprefix(self._prefix):
            raise ValueError(f"{data} has another SHA-256 than its name")
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
        """Keep what is new, and delete what nobody reads any more, in the background; called once more, wait for it."""
        if self._thread is not None:
            self._thread.join()
        if self._is_saved or self._context.process.node != 0:
            return
        self._is_saved = True
        kept = None if self._is_restored else torch.compiler.save_cache_artifacts()
        body = None if kept is None else kept[0]
        if body is None and not self._unused:
            return
        # Not waited for where a process ends early: the next attempt compiles once more.
        self._thread = threading.Thread(target=self._keep, args=(body,), name="compiled-graphs", daemon=True)
        self._thread.start()

    def _keep(self, body: bytes | None) -> None:
        try:
            # First, since a damaged file may have the very name of what replaces it.
            self._context.store.delete(self._unused)
            if body is not None:
                self._put(body)
        except (StorageError, OSError) as error:
            self._context.notice(f"compiled graphs were not kept: {error}", "warning")
        finally:
            self._file.unlink(missing_ok=True)

    def _put(self, body: bytes) -> None:
        if len(body) > MOST_BYTES:
            self._context.notice(f"compiled graphs were not kept: they take {len(body) >> 20} MiB", "warning")
            return
        data, whole = _keys(self._prefix + hashlib.sha256(body).hexdigest())
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(body)
        # Another attempt may have kept the same.
        if self._context.store.head(data) is None:
            self._context.store.put_file(self._file, data)
        # Last, so that nobody reads a file that is still being written.
        self._context.store.put_if_absent(whole, b"")


def _keys(name: str) -> tuple[str, str]:
    """The keys of graphs, and of the mark that they are whole."""
    return f"{name}.bin", f"{name}{_WHOLE}"


def _assert_own(path: Path) -> None:
    """Raise ``ValueError`` for a file that somebody else has or may have written."""
    if not path.exists():
        return
    found = path.lstat()
    if found.st_uid not in {os.geteuid(), own_user(path.parent)}:
        raise ValueError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(f"{path} can be written by other users")
