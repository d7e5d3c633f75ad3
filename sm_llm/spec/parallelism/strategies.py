"""The strategies that a task can name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from sm_llm.spec.parallelism.fsdp import FsdpSpec
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.spec.parallelism.smp import SmpSpec
from sm_llm.spec.reference.schema import tag_values


def _with_strategy(block: Any) -> Any:
    """A block without ``strategy`` is fsdp's, so that single options can be set on their own."""
    return {"strategy": "fsdp", **block} if isinstance(block, dict) else block


Parallelism = Annotated[FsdpSpec | SmpSpec | NxdSpec, Field(discriminator="strategy"), BeforeValidator(_with_strategy)]


def trained() -> frozenset[str]:
    """Names of the strategies that our own training has a worker for."""
    kinds: dict[str, Any] = tag_values(Parallelism)
    return frozenset(name for name, kind in kinds.items() if kind.can.train)
