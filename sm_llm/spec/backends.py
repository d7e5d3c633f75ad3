"""Where a job runs; one options class per backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sm_llm.spec.base import SpecModel


class LocalBackend(SpecModel):
    """This machine, without docker: the container contract in the run's own folder, under torchrun."""

    name: Literal["local"] = "local"
    """The backend."""
    threads_per_process: int | None = Field(default=None, ge=1)
    """CPU threads of each process; null shares the machine's cores out evenly."""
    stop_seconds: float = Field(default=120.0, gt=0)
    """Time from a request to stop until what still runs is killed; a checkpoint is begun only if it fits in."""


BackendSpec = LocalBackend
