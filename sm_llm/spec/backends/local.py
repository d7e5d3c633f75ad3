"""Options of the local backend: this machine."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sm_llm.spec.backends.base import BackendOptions
from sm_llm.spec.field_classes import PLACEMENT


class LocalOptions(BackendOptions):
    """This machine, without docker: the container contract in the run's own folder, under torchrun."""

    runs_here: ClassVar[bool] = True

    name: Annotated[Literal["local"], PLACEMENT] = "local"
    """The backend."""
    contract: Annotated[Literal["local", "sagemaker"], PLACEMENT] = "local"
    """``sagemaker`` emulates SageMaker: the request that it would get runs here under its own training toolkit."""
    threads_per_process: Annotated[int | None, PLACEMENT] = Field(default=None, ge=1, le=1_024)
    """CPU threads of each process; null shares the machine's cores out evenly."""
    stop_seconds: float = Field(default=120.0, gt=0, le=86_400)
    """Time from a request to stop until what still runs is killed; a checkpoint is begun only if it fits in."""
