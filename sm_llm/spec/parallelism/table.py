"""The strategies by name: the class of their options, and where the class that trains with them is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from sm_llm.spec.parallelism.fsdp import FsdpSpec
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.spec.parallelism.smp import SmpSpec

if TYPE_CHECKING:
    from sm_llm.spec.parallelism.base import StrategySpec

_WORKER = "sm_llm.worker.strategies"


@dataclass(frozen=True)
class StrategyEntry:
    """One strategy. The worker's parts are names: each lives in a software stack of its own and is imported alone."""

    options: type[StrategySpec]
    worker: str
    """``module:Class`` of its ``worker.strategies.base.Strategy``."""
    device: str = "sm_llm.worker.device:gpu_or_cpu"
    """``module:function`` that finds the ``Device`` of a process."""


STRATEGIES = {
    "fsdp": StrategyEntry(FsdpSpec, f"{_WORKER}.fsdp.strategy:FsdpStrategy"),
    "smp": StrategyEntry(SmpSpec, f"{_WORKER}.smp.strategy:SmpStrategy"),
    "nxd": StrategyEntry(NxdSpec, f"{_WORKER}.nxd.strategy:NxdStrategy", f"{_WORKER}.nxd.device:neuron_core"),
}
"""Name -> row. The first is the default."""


def strategy_spec() -> Any:
    """The type of the field ``parallelism`` of a task: the options of every strategy, chosen by ``strategy``."""
    union = reduce(or_, (row.options for row in STRATEGIES.values()))
    return Annotated[union, Field(discriminator="strategy"), BeforeValidator(_with_strategy)]


def default_options() -> StrategySpec:
    """The options of a task that names no strategy."""
    return next(iter(STRATEGIES.values())).options()


def trained() -> frozenset[str]:
    """Names of the strategies that our own training has a worker for."""
    return frozenset(name for name, row in STRATEGIES.items() if row.options.can.train)


def _with_strategy(block: Any) -> Any:
    """A block without ``strategy`` is the default's, so that single options can be set on their own."""
    return {"strategy": next(iter(STRATEGIES)), **block} if isinstance(block, dict) else block
