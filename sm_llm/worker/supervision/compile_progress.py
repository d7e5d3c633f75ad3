"""How far a node's compiler is: printed now and then, compared between nodes, and a stall that is noticed."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from sm_llm.contract.compile_cache import graphs
from sm_llm.errors import RunFailed
from sm_llm.runs.events.events import Progress
from sm_llm.storage.uri import open_store
from sm_llm.terminal import counted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.contract.compile_cache import CachedGraph
    from sm_llm.worker.context import WorkerContext

POLL_SECONDS = 5.0
"""How often a node lists its graphs: a folder on a shared file system answers slowly."""
REPORT_SECONDS = 60.0
_NOTE = "precompile/graphs/"
_SHOWN = 3


class CompileProgress:
    """Follows the graphs in one node's cache ``folder``; the first node reports those of all nodes.

    ``stall_seconds`` without a graph that was extracted, compiled or failed are a stall.
    """

    def __init__(
        self,
        context: WorkerContext,
        folder: Path,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._folder = folder
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._changed_at = clock()
        self._polled_at = self._reported_at = float("-inf")
        self._states: dict[str, str] = {}

    def poll(self) -> None:
        """List the graphs and report them, as often as it is due. Raises ``RunFailed`` for a stall."""
        now = self._clock()
        if now - self._polled_at < POLL_SECONDS:
            return
        self._list(now)
        if now - self._changed_at > self._stall_seconds:
            raise RunFailed(self._stalled(now - self._changed_at))
        self.report()

    def finish(self) -> None:
        """List the graphs once more: the last ones have changed since it was due."""
        self._list(self._clock())

    def _list(self, now: float) -> None:
        self._polled_at = now
        known = graphs(open_store(self._folder))
        # A graph that failed is a change, too: the compiler is alive and takes the next one.
        if (states := {it.graph: _state(it) for it in known}) != self._states:
            self._states, self._changed_at = states, now
            self._note()

    def report(self) -> None:
        """On the first node, the graphs of all nodes, as often as it is due: also while it waits for the others."""
        now = self._clock()
        if not self._context.process.is_leader or now - self._reported_at < REPORT_SECONDS:
            return
        self._reported_at = now
        nodes = [self._of(node) for node in range(self._context.process.node_count)]
        done, total = (sum(it[index] for it in nodes) for index in (0, 1))
        # A node without any graph has not extracted its first one: it is behind all others.
        behind = [f"node {node}: {it[0]} of {it[1]}" for node, it in enumerate(nodes) if it[0] < it[1] or not it[1]]
        detail = "; ".join(behind[:_SHOWN]) + (f" and {len(behind) - _SHOWN} more" if len(behind) > _SHOWN else "")
        quiet = f", nothing new on node 0 for {(now - self._changed_at) / 60:.0f} min"
        self._context.emit(Progress("precompile", done, total, "graphs", detail))
        self._context.log(f"graphs: {done} of {total} compiled{f' ({detail})' if detail else ''}{quiet}")

    def _note(self) -> None:
        if self._context.kv_store is not None:
            done = sum(state == "compiled" for state in self._states.values())
            # Counts alone: the first node reads every node's note with each report.
            self._context.kv_store.put(f"{_NOTE}{self._context.process.node}", json.dumps([done, len(self._states)]))

    def _of(self, node: int) -> tuple[int, int]:
        """Graphs that a node has compiled, and that it has."""
        if node == self._context.process.node:
            return sum(state == "compiled" for state in self._states.values()), len(self._states)
        noted = None if self._context.kv_store is None else self._context.kv_store.get(f"{_NOTE}{node}")
        done, total = (0, 0) if noted is None else json.loads(noted)
        return int(done), int(total)

    def _stalled(self, seconds: float) -> str:
        waiting = [graph for graph, state in self._states.items() if state == "not compiled"]
        shown = ", ".join(waiting[:_SHOWN]) + (" …" if len(waiting) > _SHOWN else "")
        still = f"{counted(len(waiting), 'graph')} not compiled ({shown})" if waiting else "no graph extracted"
        return (
            f"the compiler on node {self._context.process.node} stalled: nothing new for {seconds:.0f} s, {still}. "
            "Raise task.stall_seconds where a graph needs longer"
        )


def _state(graph: CachedGraph) -> str:
    # Neuron writes ``model.done`` last: until then the compiler still works on it.
    return "compiled" if graph.is_whole else "failed" if graph.state == "failed" else "not compiled"
