"""A job's part of the cache of compiled graphs: brought to each node before training, brought back after it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm_llm.contract.compile_cache import CACHE_URL, DESCRIPTION, CachePart, graphs, part_of, stale_locks
from sm_llm.errors import RunFailed, StorageError
from sm_llm.runs.events.events import GraphsCompiled
from sm_llm.spec.machines.neuron_releases import installed_sdk
from sm_llm.spec.parallelism.nxd import COMPILE_CACHE
from sm_llm.storage.base import Copy
from sm_llm.storage.checksum import crc64_file
from sm_llm.storage.transfer import default_transfer
from sm_llm.storage.uri import is_s3, join, open_store
from sm_llm.terminal import counted
from sm_llm.worker.inputs.stage_inputs import once_per_node

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from sm_llm.contract.compile_cache import CachedGraph
    from sm_llm.spec.tasks import TrainTask
    from sm_llm.storage.base import Store, StoredObject
    from sm_llm.storage.publication.publish import Gather
    from sm_llm.worker.context import WorkerContext

EXTRACTION = "NEURON_EXTRACT_GRAPHS_ONLY"
"""Set by ``neuron_parallel_compile`` for the program whose graphs it takes: nothing is computed then."""
_LISTED = 3


def extracts_graphs(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is run for its graphs alone, and every number in it is invalid."""
    return environ.get(EXTRACTION, "0") not in ("", "0")


def open_cache(
    context: WorkerContext,
    training: TrainTask,
    config: Mapping[str, Any],
    environ: MutableMapping[str, str] = os.environ,
) -> CompileCache | None:
    """The cache of ``training``, restored, with Neuron's variable pointing at it; None for what compiles no graphs.

    Every process calls it, before a graph is compiled. Raises ``StorageError`` where the cache cannot be read.
    """
    location = environ.get(CACHE_URL)
    # A program that is run for its graphs has its cache from the one that runs it.
    if location is None or not training.parallelism.can.compiles_ahead or extracts_graphs(environ):
        return None
    if "--cache_dir" in environ.get("NEURON_CC_FLAGS", ""):
        raise RunFailed(
            f"NEURON_CC_FLAGS names --cache_dir, which Neuron prefers to {CACHE_URL}, so the cache would be neither "
            "restored nor saved. Name the place in task.parallelism.compile_cache"
        )
    sdk = installed_sdk() or "unknown"
    cache = CompileCache(context, location, part_of(context.job.spec, training, config, sdk, environ))
    cache.restore()
    # Neuron reads the variable with the first graph that it compiles; a change after that has no effect.
    environ[CACHE_URL] = str(cache.folder)
    return cache


class CompileCache:
    """One node's cache of one job. A cache in S3 has a copy on the node; one in a shared folder is used in place.

    The copy needs no locks between nodes, and its graphs are downloaded at once, not one by one while devices wait.
    """

    def __init__(self, context: WorkerContext, location: str, part: CachePart) -> None:
        self._context = context
        self._options = context.job.spec.storage_options.model_dump()
        self._location, self._part = location, part
        self.uri = join(location, part.name)
        self._is_copy = is_s3(location)
        self.folder = context.scratch / COMPILE_CACHE / part.name if self._is_copy else Path(self.uri)
        self._held: frozenset[str] = frozenset()

    def restore(self) -> None:
        """Bring what is compiled to this node; delete failed graphs and stale locks, which later compilers heed."""
        once_per_node(self._context, f"compile cache {self.uri}", self._restore)
        # Counted before anything is compiled: what is there besides at the end is new.
        self._held = frozenset(it.graph for it in self._compiled())

    def _restore(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._is_copy:
            shared = open_store(self.uri, self._options)
            # Nobody else uses the copy: whatever an attempt that was killed has locked there is free.
            _clean(open_store(self.folder), older_than_minutes=0.0)
            self._context.agent.call(download_graphs, shared, self.folder)
        else:
            shared = open_store(self.folder)
        if self._context.process.is_leader:
            failed, locks = _clean(shared)
            if failed or locks:
                self._context.notice(
                    f"compile cache {self.uri}: deleted {counted(failed, 'graph')} that failed and "
                    f"{counted(locks, 'stale lock')}"
                )
            self._describe(shared)
        return ""

    def _describe(self, shared: Store) -> None:
        """Report what the cache has for this job; where it has nothing, how the nearest other part differs."""
        found = len(self._compiled())
        already = "is compiled already" if found == 1 else "are compiled already"
        self._context.notice(f"compile cache {self.uri}: {counted(found, 'graph')} {already}")
        # Once: the name of a part is a digest of this text, so all its jobs would write the same.
        shared.put_if_absent(DESCRIPTION, self._part.to_json().encode())
        if found or not (others := self._differences()):
            return
        # A difference in one flag is what a person wants to see; other models differ in dozens of values.
        nearest = min(others, key=len)
        more = f" and {len(nearest) - _LISTED} more" if len(nearest) > _LISTED else ""
        self._context.notice(
            f"the nearest compiled graphs are of another job: {', '.join(nearest[:_LISTED])}{more}", "warning"
        )

    def _differences(self) -> list[list[str]]:
        """Of every other part with compiled graphs, in what it differs from this one."""
        root = open_store(self._location, self._options)
        parts = {it.part for it in graphs(root) if it.part not in ("", self._part.name) and it.state == "compiled"}
        texts = [root.get(f"{part}/{DESCRIPTION}") for part in sorted(parts)]
        return [found for text in texts if text is not None and (found := self._part.differences(text))]

    def _compiled(self) -> list[CachedGraph]:
        return [it for it in graphs(open_store(self.folder)) if it.is_whole]

    def report(self, gather: Gather) -> None:
        """Emit how many graphs there were and how many this job has compiled, on all nodes (``GraphsCompiled``).

        Every process calls it; ``gather`` gives every process's value.
        """
        found = gather(self._counts() if self._counts_here else None)
        nodes = [it for it in found if it is not None]
        held, new, failed = (sum(it[index] for it in nodes) for index in range(3))
        used = held + new + failed
        # A job that was stopped before its first step used no graph, and has no hit rate.
        rate = held / used if used else None
        self._context.emit(GraphsCompiled(self.uri, held, new, failed, rate, nodes))
        if rate is None:
            return
        where = f" on {counted(len(nodes), 'node')}" if self._is_copy else " in one shared folder"
        short = [f"node {node} {it[0]} of {sum(it)}" for node, it in enumerate(nodes) if it[0] != sum(it)]
        apart = (
            f" ({', '.join(short[:_LISTED])}{' …' if len(short) > _LISTED else ''})" if len(nodes) > 1 and short else ""
        )
        self._context.log(
            f"compiled graphs{where}: {held} from the cache ({100 * rate:.0f}%){apart}, {new} new, {failed} failed"
        )

    @property
    def _counts_here(self) -> bool:
        """Whether this process counts: the first of each node with a copy, the first of all for a shared folder."""
        return self._context.process.is_node_leader if self._is_copy else self._context.process.is_leader

    def _counts(self) -> list[int]:
        """Graphs that were there, that are new, and that failed."""
        known = graphs(open_store(self.folder))
        new = len({it.graph for it in known if it.is_whole} - self._held)
        return [len(self._held), new, sum(it.state == "failed" for it in known)]

    def save(self) -> None:
        """Bring new graphs to the shared cache, by the node's first process. A store that fails is reported."""
        if not self._is_copy or not self._context.process.is_node_leader:
            return
        try:
            count = self._context.agent.call(upload_graphs, open_store(self.uri, self._options), self.folder)
        except StorageError as error:
            # The training is worth more than its graphs, which the next job can compile again.
            self._context.notice(f"compiled graphs were not saved: {error}", "warning")
            return
        if count:
            self._context.notice(f"compile cache {self.uri}: saved {counted(count, 'graph')}")

    def failures(self) -> list[tuple[str, str]]:
        """(graph, the compiler's last words) of every graph that failed on this node."""
        found = [it for it in graphs(open_store(self.folder)) if it.state == "failed"]
        return [(it.graph, _last_words(self.folder, it)) for it in found]


def _last_words(folder: Path, graph: CachedGraph) -> str:
    (log,) = [it for it in graph.files if it.endswith("/model.log")]
    with suppress(OSError):
        lines = (folder / log).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((it.strip() for it in reversed(lines) if it.strip()), "no reason was logged")
    return "no reason was logged"


def _clean(store: Store, older_than_minutes: float | None = None) -> tuple[int, int]:
    """Delete failed graphs and stale locks; returns how many of both."""
    failed = [it for it in graphs(store) if it.state == "failed"]
    locks = stale_locks(store) if older_than_minutes is None else stale_locks(store, older_than_minutes)
    if keys := [*(key for it in failed for key in it.files), *(it.key for it in locks)]:
        store.delete(keys)
    return len(failed), len(locks)


def download_graphs(store: Store, folder: Path, *, progress: Callable[[int], None]) -> int:
    """Fetch every compiled graph that ``folder`` does not have; returns their number."""
    held = {it.graph for it in graphs(open_store(folder)) if it.is_whole}
    wanted = [it for it in graphs(store) if it.is_whole and it.graph not in held]
    sizes = {it.key: it for it in store.list("")} if wanted else {}
    files, marks = [], []
    for it in wanted:
        *names, mark = _done_last(it)
        files += [_copy(sizes[key], folder) for key in names]
        marks.append(_copy(sizes[mark], folder))
    # As in ``upload_graphs``: whatever has its mark is whole.
    for copies in (files, marks):
        reported = default_transfer(store).download(store, copies, progress) if copies else {}
        for copy in copies:
            if (wanted_sum := reported.get(copy.key) or copy.crc64nvme) and crc64_file(copy.path) != wanted_sum:
                raise StorageError(f"{store.uri}: {copy.key!r} did not arrive as it is stored. Try again")
    return len(wanted)


def _copy(it: StoredObject, folder: Path) -> Copy:
    path = folder / it.key
    path.parent.mkdir(parents=True, exist_ok=True)
    return Copy(it.key, path, it.size, it.crc64nvme or "")


def upload_graphs(store: Store, folder: Path, *, progress: Callable[[int], None]) -> int:
    """Store every compiled graph of ``folder`` that the store does not have whole; returns their number."""
    # Nodes compile the same graphs; whichever comes later has nothing left to store.
    held = {it.graph for it in graphs(store) if it.is_whole}
    wanted = [it for it in graphs(open_store(folder)) if it.is_whole and it.graph not in held]
    transfer = default_transfer(store)
    for it in wanted:
        paths = [(key, folder / key) for key in _done_last(it)]
        copies = [Copy(key, path, path.stat().st_size, crc64_file(path)) for key, path in paths]
        # The mark of a whole graph comes last: a job that is killed in between leaves one that nobody takes.
        transfer.upload(store, copies[:-1], progress)
        transfer.upload(store, copies[-1:], progress)
    return len(wanted)


def _done_last(graph: CachedGraph) -> Sequence[str]:
    """Its files without locks, ``model.done`` last."""
    keys = [it for it in graph.files if not it.endswith(".lock")]
    return sorted(keys, key=lambda it: it.endswith("/model.done"))
