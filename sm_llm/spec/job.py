"""JobSpec, one task and where it runs, and WorkflowSpec, named jobs that feed one another."""

from __future__ import annotations

from pydantic import Field

from sm_llm.spec.backends import BackendSpec, LocalBackend
from sm_llm.spec.base import SpecModel
from sm_llm.spec.compute import ComputeSpec
from sm_llm.spec.tasks import Task

DEFAULT_STORAGE = "./runs"


class JobSpec(SpecModel):
    """One task, the machines it runs on and the storage its run lives in."""

    name: str
    """Letters, digits and hyphens, at most 63; the run id starts with it."""
    task: Task
    compute: ComputeSpec = Field(default_factory=ComputeSpec)
    backend: BackendSpec = Field(default_factory=LocalBackend)
    storage: str = DEFAULT_STORAGE
    """Folder or URI under which every run gets its own folder."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Named inputs; elsewhere in the task ``inputs.NAME[/sub/folder]`` refers to one."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the worker processes."""


class StepSpec(SpecModel):
    """One step of a workflow; what is left out comes from the workflow."""

    task: Task
    after: list[str] = Field(default_factory=list)
    compute: ComputeSpec | None = None
    inputs: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)


class WorkflowSpec(SpecModel):
    """Named steps in order. ``steps.NAME.output[/sub/folder]`` in a later step refers to what a step published."""

    name: str
    steps: dict[str, StepSpec] = Field(min_length=1)
    compute: ComputeSpec = Field(default_factory=ComputeSpec)
    backend: BackendSpec = Field(default_factory=LocalBackend)
    storage: str = DEFAULT_STORAGE
    environment: dict[str, str] = Field(default_factory=dict)
