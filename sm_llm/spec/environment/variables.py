"""Environment variables of a job, and its secrets by reference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue
from sm_llm.redaction import HIDDEN, is_token_shaped
from sm_llm.secret_names import is_secret_name, words
from sm_llm.spec.backends.table import options_class

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sm_llm.spec.tree import Path, Tree


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
    Reserved(r"RUN_NEURON_PARALLEL_COMPILE", "the toolkit would count no failed graphs", "Use task.kind=precompile"),
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
    """Names that are none, or not the job's, or given twice."""
    for name in environment:
        if not VARIABLE.fullmatch(name):
            remedy = "Use letters, digits and underscores, and no digit first"
            yield Issue(
                "environment-variable-name-invalid",
                f"environment.{name}",
                "not a name of an environment variable",
                remedy=remedy,
            )
        elif name in secrets:
            yield Issue(
                "environment-variable-given-twice", f"environment.{name}", "is set here and by secrets; keep one"
            )
    yield from reserved_issues(environment)
    # A name that is in both has its issue already.
    yield from reserved_issues((name for name in secrets if name not in environment), "secrets")


FORMS = "env:NAME, file:/PATH, secretsmanager:ARN, ssm:NAME or k8s:SECRET/KEY"
_REFERENCE = re.compile(
    r"env:[A-Za-z_][A-Za-z0-9_]*|file:[/~].*|secretsmanager:arn:[\w-]+:secretsmanager:[\w-]+:\d{12}:secret:\S+"
    r"|ssm:[\w./:-]+|k8s:[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[\w.-]+"
)
# A value of an argument that may be a password: no path, piece of text, placeholder or number.
_TYPED = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[^\s<>{}$/][^\s<>{}$]{7,}")


def conceal(tree: Tree) -> list[Issue]:
    """Take every secret that was typed into a specification out of it; one issue for each, without its value.

    A secret is anything in the shape of a token wherever it stands, whatever ``secrets`` holds that is not a reference,
    and the value of an environment variable whose name marks it as one (``WANDB_API_KEY``); of an argument of a program
    only if it is made of letters and digits, since ``--audio_token`` may mean a piece of text.
    """
    issues = []
    leaves = list(_leaves(tree.value, ()))
    # As they were written: a flag must be readable after its value was hidden, and the reverse.
    values = dict(leaves)
    options = options_class(tree.get(("backend",)))
    keeper = options.secret_keeper if options is not None else "env"
    for path, value in leaves:
        if problem := _problem(path, value) or _argument_problem(path, values):
            tree.replace(path, HIDDEN)
            # The characters that were typed hold the secret as well, those of a whole mapping or list among them.
            for end in range(len(path) + 1):
                tree.texts.pop(path[:end], None)
            issues.append(
                Issue(
                    "secret-written-out",
                    ".".join(path),
                    problem,
                    remedy=_remedy(path, keeper),
                    origin=tree.origin(path),
                )
            )
    return issues


def _problem(path: Path, value: Any) -> str:
    if entry := _entry(path, "secrets"):
        if not VARIABLE.fullmatch(entry[0]):
            return "not a name of an environment variable"
        is_reference = len(entry) == 1 and isinstance(value, str) and _REFERENCE.fullmatch(value)
        return "" if is_reference else f"is not a reference: expected {FORMS}"
    # Keys as well: a token may have been typed as one.
    if any(isinstance(it, str) and is_token_shaped(it) for it in (value, *path)):
        return "holds what looks like a token or password, and a specification is stored and shown"
    entry = _entry(path, "environment")
    # Of a list or mapping, which is refused for its type, every part: the refusal shows the value.
    if entry and _is_secret(entry[0]) and value not in (None, ""):
        return "looks like a secret, and environment variables are stored and shown"
    return ""


def _argument_problem(path: Path, values: Mapping[Path, Any]) -> str:
    """What is wrong with an argument: ``name: value``, ``--name=value``, or ``--name`` and ``value``."""
    entry, value = _entry(path, "task"), values[path]
    if len(entry) != 2 or entry[0] != "args" or not isinstance(value, str):
        return ""
    name = entry[1]
    # ``args`` is a list: the name is in this word or in the one before it.
    if name.isdigit():
        flag, equals, rest = value.partition("=")
        before = str(values.get((*path[:-1], str(int(name) - 1)), ""))
        name, value = (flag, rest) if equals else (before, value)
        # The word before is not a flag, or has its value already.
        if not name.startswith("-") or "=" in name:
            return ""
    if is_secret_name(name) and _TYPED.fullmatch(value):
        return "looks like a secret, and arguments are stored and shown"
    return ""


def _is_secret(variable: str) -> bool:
    """Whether a variable of this name holds a secret; of keys, which variables seldom name otherwise, all do."""
    spelt = [it for it in words(variable) if not it.isdigit()]
    return is_secret_name(variable) or spelt[-1:] in (["key"], ["keys"])


def _entry(path: Path, block: str) -> Path:
    """The part of ``path`` inside such a block of a job, a workflow or a step; empty if it is elsewhere."""
    if path[:1] == (block,):
        return path[1:]
    return path[3:] if path[:1] == ("steps",) and path[2:3] == (block,) else ()


def _remedy(path: Path, keeper: str) -> str:
    """``keeper``: where a job of this backend can read a secret."""
    if entry := _entry(path, "secrets"):
        return f"Keep the value elsewhere and refer to it: secrets.{entry[0]}={keeper}:{entry[0]}"
    name = path[-1].upper() if re.fullmatch(r"[A-Za-z_]+", path[-1]) else "NAME"
    return f"Refer to it instead, for example secrets.{name}={keeper}:{name}; the worker gets it as a variable"


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    elif path:
        yield path, value
