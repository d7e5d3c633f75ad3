"""Compiles decoder layers, and counts how much of each of them runs as compiled graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sm_llm.runs.events.events import LayersCompiled

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = "inductor"
"""torch.compile's own default."""


@dataclass
class _Layer:
    """One compiled module: its calls, and how many graphs ran in them."""

    name: str
    module: torch.nn.Module
    compiled_call: Callable[..., Any]
    calls: int = 0
    graphs: int = 0


class CompiledLayers:
    """Compiles modules one by one and counts, until ``report``, what runs when they are called.

    torch.compile falls back to eager code without an error: where a graph breaks, and where a layer needs one more
    graph than its limit. Its own statistics count graphs once, however many layers share them, so the graphs are
    counted here as they run.
    """

    def __init__(self, memory_budget: float | None = None) -> None:
        """``memory_budget``: share of its activations that a compiled layer keeps; it computes the rest again.

        The partitioner solves for the least computation that fits (torch._functorch.config.activation_memory_budget).
        """
        self._memory_budget = 1.0 if memory_budget is None else memory_budget
        self._layers: list[_Layer] = []
        self._seconds_before = 0.0
        self._graphs = 0
        self._runs = 0

    def compile(self, module: torch.nn.Module, name: str) -> None:
        """Compile what ``module`` computes, as ``module.compile()`` does. Raises nothing; see ``report``."""
        module.compile(backend=self._backend)  # loads torch._dynamo, which takes seconds
        if not self._layers:
            self._seconds_before = _compile_seconds()
        # A setting of the whole process, read when a layer is first called.
        torch._functorch.config.activation_memory_budget = self._memory_budget
        layer = _Layer(name, module, module._compiled_call_impl)  # type: ignore[arg-type]

        def counted(*args: Any, **kwargs: Any) -> Any:
            # Graphs that run during the call are this layer's: the main thread calls one layer at a time.
            before = self._runs
            result = layer.compiled_call(*args, **kwargs)
            layer.calls += 1
            layer.graphs += self._runs - before
            return result

        # A forward hook would be traced, and break the graph that it counts.
        module._compiled_call_impl = counted
        self._layers.append(layer)

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        compiled = torch._dynamo.lookup_backend(BACKEND)(graph, inputs, **options)
        self._graphs += 1

        def run(*args: Any) -> Any:
            self._runs += 1
            return compiled(*args)

        return run

    def report(self) -> LayersCompiled | None:
        """What ran since the layers were compiled; None if there are none. Ends the counting."""
        if not self._layers:
            return None
        for layer in self._layers:
            layer.module._compiled_call_impl = layer.compiled_call
        called = [layer for layer in self._layers if layer.calls]
        reasons = torch._dynamo.utils.counters["graph_break"]
        return LayersCompiled(
            layers=len(called),
            graphs=self._graphs,
            # One graph per call is the goal: none is eager code, more than one a graph that broke.
            eager=[layer.name for layer in called if layer.graphs == 0],
            broken=[layer.name for layer in called if layer.graphs > layer.calls],
            graph_breaks={_first_line(text): count for text, count in reasons.items()},
            seconds=_compile_seconds() - self._seconds_before,
        )


def compile_forward(module: torch.nn.Module) -> None:
    """Compile a small module that shares its FSDP group with others: without the hooks that this puts on it."""
    module.forward = torch.compile(module.forward, backend=BACKEND)


def _compile_seconds() -> float:
    """What torch.compile has taken in this process so far."""
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])


def _first_line(reason: str) -> str:
    """The cause of a graph break; the rest of torch's text explains it at length."""
    return reason.strip().partition("\n")[0]
