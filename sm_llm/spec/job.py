"""JobSpec, one task and where it runs, and WorkflowSpec, named jobs that feed one another."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sm_llm.spec.backends.table import backend_spec, default_options
from sm_llm.spec.base import SpecModel
from sm_llm.spec.field_classes import DATA, FREE, PLACEMENT, RUN
from sm_llm.spec.inputs import Input, StorageOptions
from sm_llm.spec.machines.compute import ComputeSpec
from sm_llm.spec.tasks import Task

if TYPE_CHECKING:
    from sm_llm.spec.backends.base import BackendOptions as BackendSpec
else:  # a field's type, made of the table's rows
    BackendSpec = backend_spec()

DEFAULT_STORAGE = "./runs"


class JobSpec(SpecModel):
    """One task, the machines it runs on and the storage its run lives in."""

    name: Annotated[str, RUN]
    """Letters, digits and hyphens, at most 63; the run id starts with it."""
    task: Task
    """What the job does."""
    compute: Annotated[ComputeSpec, PLACEMENT] = Field(default_factory=ComputeSpec)
    """Machines and processes."""
    backend: Annotated[BackendSpec, FREE] = Field(default_factory=default_options)
    """Where the job runs."""
    storage: Annotated[str, RUN] = DEFAULT_STORAGE
    """Folder or URI under which every run gets its own folder."""
    storage_options: Annotated[StorageOptions, FREE] = Field(default_factory=StorageOptions)
    """How S3 is reached, for the storage and for every source in S3."""
    inputs: Annotated[dict[str, Input], DATA] = Field(default_factory=dict)
    """Named inputs; elsewhere in the task ``inputs.NAME[/sub/folder]`` refers to one. On SageMaker those in S3 or on a
    file system are input channels; places that the task names directly are read by the worker itself."""
    environment: Annotated[dict[str, str], PLACEMENT] = Field(default_factory=dict)
    """Environment variables of the worker processes."""
    secrets: Annotated[dict[str, str], FREE] = Field(default_factory=dict)
    """Environment variables of the worker by reference: NAME -> env:NAME, file:/PATH, secretsmanager:ARN, ssm:NAME or
    k8s:SECRET/KEY; only the worker reads the values."""


class StepSpec(SpecModel):
    """One step of a workflow; what is left out comes from the workflow."""

    task: Task
    """What the step does."""
    after: Annotated[list[str], FREE] = Field(default_factory=list)
    """Earlier steps that must finish first, beside those that this step refers to."""
    compute: Annotated[ComputeSpec | None, PLACEMENT] = None
    """Machines and processes; null takes the workflow's."""
    inputs: Annotated[dict[str, Input], DATA] = Field(default_factory=dict)
    """Named inputs of this step."""
    environment: Annotated[dict[str, str], PLACEMENT] = Field(default_factory=dict)
    """Environment variables of this step, over the workflow's."""
    secrets: Annotated[dict[str, str], FREE] = Field(default_factory=dict)
    """Secrets of this step by reference, over the workflow's."""


class WorkflowSpec(SpecModel):
    """Named steps in order. ``steps.NAME.output[/sub/folder]`` in a later step refers to what a step published."""

    name: Annotated[str, RUN]
    """Letters, digits and hyphens; with a hyphen and a step's name at most 63."""
    steps: dict[str, StepSpec] = Field(min_length=1)
    """The steps by name; a step refers to earlier ones only."""
    compute: Annotated[ComputeSpec, PLACEMENT] = Field(default_factory=ComputeSpec)
    """Machines and processes of steps that have none of their own."""
    backend: Annotated[BackendSpec, FREE] = Field(default_factory=default_options)
    """Where the steps run."""
    storage: Annotated[str, RUN] = DEFAULT_STORAGE
    """Folder or URI under which every run gets its own folder."""
    storage_options: Annotated[StorageOptions, FREE] = Field(default_factory=StorageOptions)
    """How S3 is reached, for the storage and for every source in S3."""
    environment: Annotated[dict[str, str], PLACEMENT] = Field(default_factory=dict)
    """Environment variables of the worker processes of all steps."""
    secrets: Annotated[dict[str, str], FREE] = Field(default_factory=dict)
    """Environment variables of all steps by reference, as in a job."""


def spec_digest(spec: JobSpec | WorkflowSpec) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of ``spec`` without ``name``, where it is stored, and ``secrets``.

    Defaults are part of it: two specifications are equal if they mean the same, however they were written.
    """
    body = spec.model_dump(mode="json", exclude={"name", "storage", "storage_options", "secrets"})
    # ``exclude`` removed the workflow's own; steps have secrets, too.
    for step in body.get("steps", {}).values():
        del step["secrets"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
