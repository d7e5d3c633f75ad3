"""Environment variables that a job may not set, on any backend: their owner sets or ignores them.

A name that is not listed here keeps the value that the specification gives it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Reserved:
    """Names that belong to somebody: a pattern, whose they are, and the field to use."""

    pattern: str
    owner: str
    remedy: str


FREE = ("SM_LLM_SCRATCH_DISK", "SM_LLM_BREAK_BEFORE_STEPS")
"""Names of ours that a job may set."""

RESERVED: tuple[Reserved, ...] = (
    Reserved(
        r"MASTER_ADDR|MASTER_PORT|(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|ROLE_NAME|TORCHELASTIC_.*|PET_.*",
        "torchrun sets it for every process",
        "Set compute.instance_count and compute.processes_per_instance; the ranks follow from them",
    ),
    Reserved(
        r"NODE_RANK|GLOBAL_RANK|NNODES|NUM_NODES|NPROC_PER_NODE",
        "every node and process would get one and the same value",
        "Set compute.instance_count and compute.processes_per_instance; a program reads RANK, GROUP_RANK, WORLD_SIZE",
    ),
    Reserved(
        r"SLURM_.*|OMPI_.*|PMI_.*|PMIX_.*",
        "a scheduler or MPI sets it for the processes that it starts",
        "Use a name of your own",
    ),
    Reserved(
        r"AWS_REGION|AWS_DEFAULT_REGION",
        "the platform sets it to the region of the job",
        "Set backend.region for the job, storage_options.region for the bucket; a local run takes it from the shell",
    ),
    Reserved(
        r"CA_REPOSITORY_ARN",
        "the training toolkit reads it only for a requirements.txt beside its entry point, which no job has",
        "Set environment.PIP_INDEX_URL, or backend.wheelhouse",
    ),
    Reserved(r"SM_LLM_WHEELHOUSE", "sm_llm sets it from backend.wheelhouse", "Set backend.wheelhouse"),
    Reserved(r"SM_LLM_.*", "sm_llm sets it for the job's processes", "Use a name of your own"),
    Reserved(
        r"SM_.*|SAGEMAKER_.*|TRAINING_JOB_NAME|TRAINING_JOB_ARN|CURRENT_HOST",
        "SageMaker and its training toolkit set it",
        "Use a name of your own; a script reads task.args from SM_HPS",
    ),
    Reserved(
        r"AWS_CONTAINER_CREDENTIALS_(?:RELATIVE|FULL)_URI|ECS_CONTAINER_METADATA_.*|AWS_EXECUTION_ENV",
        "the platform sets it, with the credentials of the job's role",
        "Set backend.role",
    ),
    Reserved(r"RUN_NEURON_PARALLEL_COMPILE", "the precompile task sets it", "Set task.kind=precompile"),
)
"""The first pattern that matches the whole name decides."""


def reserved(name: str) -> Reserved | None:
    """Whose a name is; None for one that a job may set."""
    if name in FREE:
        return None
    return next((it for it in RESERVED if re.fullmatch(it.pattern, name)), None)


def reserved_issues(names: Iterable[str], where: str = "environment", origin: str = "") -> Iterator[Issue]:
    """An issue for every name that a job may not set."""
    for name in names:
        if (found := reserved(name)) is not None:
            yield Issue(
                "environment-variable-reserved",
                f"{where}.{name}",
                f"cannot be set: {found.owner}",
                remedy=found.remedy,
                origin=origin,
            )


def environment_issues(environment: Mapping[str, str], secrets: Mapping[str, str]) -> Iterator[Issue]:
    """Names that are none, or not the job's; values that no variable can hold; names that are given twice."""
    for name, value in environment.items():
        if not VARIABLE.fullmatch(name):
            remedy = "Use letters, digits and underscores, and no digit first"
            yield Issue(
                "environment-variable-name-invalid",
                f"environment.{name}",
                "not a name of an environment variable",
                remedy=remedy,
            )
        elif "\0" in value:
            yield Issue(
                "environment-variable-holds-nul",
                f"environment.{name}",
                "holds a NUL character, which ends a variable",
                value,
                "Leave it out",
            )
        elif name in secrets:
            yield Issue(
                "environment-variable-given-twice", f"environment.{name}", "is set here and by secrets; keep one"
            )
    yield from reserved_issues(environment)
    yield from reserved_issues((name for name in secrets if name not in environment), "secrets")
