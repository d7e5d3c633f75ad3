"""The backends by name: the class of their options, and where the class that renders and starts jobs is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sm_llm.spec.backends.kubeflow import KubeflowOptions
from sm_llm.spec.backends.local import LocalOptions
from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.spec.backends.slurm import SlurmOptions

if TYPE_CHECKING:
    from sm_llm.spec.backends.base import BackendOptions


@dataclass(frozen=True)
class BackendEntry:
    """One backend."""

    options: type[BackendOptions]
    backend: str
    """``module:Class`` of its ``launcher.backend.Backend``, which is loaded when a job is for it."""


BACKENDS = {
    "local": BackendEntry(LocalOptions, "sm_llm.launcher.backends.local.backend:LocalBackend"),
    "sagemaker": BackendEntry(SageMakerOptions, "sm_llm.launcher.backends.sagemaker.backend:SageMakerBackend"),
    "slurm": BackendEntry(SlurmOptions, "sm_llm.launcher.backends.slurm.backend:SlurmBackend"),
    "kubeflow": BackendEntry(KubeflowOptions, "sm_llm.launcher.backends.kubeflow.backend:KubeflowBackend"),
}
"""Name -> row. The first is the default."""


def backend_spec() -> Any:
    """The type of the field ``backend`` of a specification: the options of every backend, chosen by ``name``."""
    union = reduce(or_, (row.options for row in BACKENDS.values()))
    return Annotated[union, Field(discriminator="name")]


def default_options() -> BackendOptions:
    """The options of a job that names no backend."""
    return next(iter(BACKENDS.values())).options()


def options_class(backend: Any) -> type[BackendOptions] | None:
    """The options class that a mapping of options is meant for, not checked yet; None where it names no backend."""
    named = backend.get("name", next(iter(BACKENDS))) if isinstance(backend, dict) else None
    row = BACKENDS.get(named) if isinstance(named, str) else None
    return row.options if row is not None else None
