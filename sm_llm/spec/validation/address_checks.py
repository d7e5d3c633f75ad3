"""Checkers of names, addresses and inputs: of the job as a whole, whatever its task."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from typing import TYPE_CHECKING

from sm_llm.bucket_names import bucket_problem
from sm_llm.errors import Issue
from sm_llm.spec.environment.variables import environment_issues
from sm_llm.spec.inputs import INPUT_NAME, MOUNT, S3Input, input_location, input_variable
from sm_llm.spec.references import references, sources
from sm_llm.spec.tasks import ScriptTask, TrainTask
from sm_llm.spec.training import SyntheticData
from sm_llm.spec.validation.runner import blocked_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.job import JobSpec, WorkflowSpec

# The strictest of the platforms: names of training jobs and Kubernetes' labels have at most 63 characters.
NAME_LENGTH = 63
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?")
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEMES = ("file", "s3")
_NO_FOLDERS = ("", ".", "..")
# Classes whose objects must be restored, for hours, before they can be read.
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
# Those that CreateMultipartUpload documents.
_CLASSES = (
    "STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR", "REDUCED_REDUNDANCY",
    "EXPRESS_ONEZONE", "OUTPOSTS",
)  # fmt: skip
# A revision may not hold a slash, but for the hub's own refs of pull requests and conversions.
HUB = re.compile(r"hf://(?:datasets/|models/)?[\w.-]+/[\w.-]+(?:@(?:refs/(?:pr|convert)/)?[^/@]+)?(?:/(?P<path>.*))?")


def check_name(spec: JobSpec | WorkflowSpec) -> Iterator[Issue]:
    """The name, of which those of runs and jobs are made."""
    yield from name_issues("name", spec.name)


def name_issues(path: str, name: str, suffix_of: str = "") -> Iterator[Issue]:
    """A name that is none, or too long with the workflow's before it."""
    whole = f"{suffix_of}-{name}" if suffix_of else name
    if not _NAME.fullmatch(name):
        # Letters without their accents, of those that have some.
        plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
        valid = re.sub(r"[^A-Za-z0-9]+", "-", plain).strip("-") or "my-run"
        yield Issue(
            "name-invalid", path, "a name has letters, digits and hyphens only, none at its ends", name, f"Try {valid}"
        )
    elif len(whole) > NAME_LENGTH:
        yield Issue(
            "name-too-long", path, f"a name has at most {NAME_LENGTH} characters", whole, f"This one has {len(whole)}"
        )


def check_storage_address(spec: JobSpec | WorkflowSpec) -> Iterator[Issue]:
    """Where the run is kept."""
    yield from _address_issues("storage", spec.storage)


def check_storage_class(spec: JobSpec | WorkflowSpec) -> Iterator[Issue]:
    """Storage classes of S3 whose objects cannot be read at once, and names that S3 does not know; other stores have
    their own."""
    options = spec.storage_options
    path, name = "storage_options.storage_class", options.storage_class
    if name in _ARCHIVES:
        problem = "is an archive: no checkpoint could be read again before it is restored"
        yield Issue("storage-class-archived", path, problem, name, "Use STANDARD, INTELLIGENT_TIERING or GLACIER_IR")
    elif name is not None and options.endpoint_url is None and name not in _CLASSES:
        yield Issue(
            "storage-class-unknown", path, "is not a storage class of S3", name, f"Known: {', '.join(_CLASSES)}"
        )


def check_environment(job: JobSpec) -> Iterator[Issue]:
    """Environment variables and the names of secrets."""
    yield from environment_issues(job.environment, job.secrets)


def check_inputs(job: JobSpec) -> Iterator[Issue]:
    """Names that are none, modes that no training can read, and references to inputs that there are not."""
    for name, value in job.inputs.items():
        if not INPUT_NAME.fullmatch(name):
            problem = "an input's name has 1 to 64 letters, digits and . _ -, and begins with a letter or digit"
            valid = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:64] or "data"
            yield Issue("input-name-invalid", f"inputs.{name}", problem, name, f"Try {valid}")
        if isinstance(value, S3Input) and value.mode == "Pipe":
            problem = "a pipe can be read only once and in order, which neither shuffling nor resume can do"
            yield Issue("pipe-mode-unsupported", f"inputs.{name}.mode", problem, value.mode, "Use FastFile or File")
    for path, kind, name in references(job):
        if kind != "input":
            continue
        if path.startswith("inputs."):
            yield Issue(
                "input-refers-to-input",
                path,
                "an input cannot refer to another input",
                input_location(job.inputs[path.removeprefix("inputs.")]),
            )
        elif name not in job.inputs:
            yield Issue(
                "input-unknown",
                path,
                "there is no such input",
                name,
                f"Known inputs: {', '.join(job.inputs) or 'none'}",
            )


def check_input_settings(job: JobSpec) -> Iterator[Issue]:
    """Settings of inputs that nobody but a platform that mounts them has, and such as our own tasks cannot read."""
    for name, value in job.inputs.items():
        for field in ("distribution", "data_type") if isinstance(value, S3Input) else ():
            chosen, usual = getattr(value, field), S3Input.model_fields[field].default
            where, remedy = f"inputs.{name}.{field}", f"Write {usual}, or leave it out"
            if chosen != usual and not job.backend.mounts_inputs:
                yield Issue("input-setting-of-sagemaker", where, "has an effect on SageMaker only", chosen, remedy)
            elif chosen == "ShardedByS3Key" and not isinstance(job.task, ScriptTask):
                problem = "gives every node other files, and every process reads all rows"
                yield Issue("input-sharded-for-rows", where, problem, chosen, remedy)


@blocked_by("pipe-mode-unsupported", "input-refers-to-input", "input-unknown")
def check_unread_inputs(job: JobSpec) -> Iterator[Issue]:
    """Inputs that the task neither refers to nor reads from by their place; a script may read any."""
    if isinstance(job.task, ScriptTask):
        return
    # Read by a reference, or by an address at or below that of the input.
    named = {name for path, kind, name in references(job) if kind == "input" and path.startswith("task.")}
    locations = [f"{location.rstrip('/')}/" for location in sources(job).values()]
    for name, value in job.inputs.items():
        read = (
            f"{input_location(value).rstrip('/')}/",
            f"{MOUNT}/{name}/",
        )  # inside a container the channel stands for it
        if name in named or any(location.startswith(read) for location in locations):
            continue
        reads = f"the {job.task.kind} task does not read it"
        remedy = f"Refer to it where the task reads it, as inputs.{name}, or leave it out"
        if isinstance(job.task, TrainTask) and isinstance(job.task.data, SyntheticData):
            reads += ": it trains on RANDOM TOKENS (task.data.format=synthetic)"
            remedy = f"Read it with task.data.format=rows task.data.train=inputs.{name}, or leave it out"
        yield Issue("input-unread", f"inputs.{name}", reads, input_location(value), remedy)


def check_input_variables(job: JobSpec) -> Iterator[Issue]:
    """Inputs that a program would find under one variable: one of them would hide the other."""
    if not isinstance(job.task, ScriptTask):
        return
    # Variable -> the input that has it.
    first: dict[str, str] = {}
    for name in job.inputs:
        other = first.setdefault(input_variable(name), name)
        if other != name:
            problem = f"a program would find it in {input_variable(name)}, where it finds {other}"
            yield Issue("input-variables-collide", f"inputs.{name}", problem, remedy="Rename one of the two")


def check_addresses(job: JobSpec) -> Iterator[Issue]:
    """Places that the task and the inputs name."""
    for path, location in {**sources(job), **_input_uris(job)}.items():
        yield from _address_issues(path, location, hub=not path.endswith("start.checkpoint"))


def check_step_references(job: JobSpec) -> Iterator[Issue]:
    """References to steps in a job that is not one."""
    for path, kind, name in references(job):
        if kind == "step":
            problem = f"refers to step {name!r}, but a job alone has no steps"
            yield Issue("step-reference-in-a-job", path, problem, remedy="Write a workflow")


def _input_uris(job: JobSpec) -> dict[str, str]:
    """Inputs that are places to read, by their path in the specification."""
    uris = {f"inputs.{name}": it for name, it in job.inputs.items() if isinstance(it, str)}
    return uris | {f"inputs.{name}.uri": it.uri for name, it in job.inputs.items() if isinstance(it, S3Input)}


def _address_issues(path: str, location: str, *, hub: bool = False) -> Iterator[Issue]:
    """``hub``: whether the place may be on the Hugging Face hub."""
    scheme = SCHEME.match(location)
    if not location.strip():
        yield Issue("address-empty", path, "is empty", location)
    elif scheme and scheme[1] == "hf" and hub:
        if not HUB.fullmatch(location):
            yield Issue(
                "hub-address-invalid",
                path,
                "is not an address on the hub",
                location,
                "Write hf://org/name@revision or hf://datasets/…",
            )
    # After hf, which is only where the hub can be read.
    elif scheme and scheme[1] not in _SCHEMES:
        known = ", ".join(f"{it}://" for it in (*_SCHEMES, *(["hf"] if hub else [])))
        yield Issue(
            "address-scheme-unsupported",
            path,
            f"{scheme[1]}:// is not supported",
            location,
            f"Give a folder, or one of {known}",
        )
    elif scheme and scheme[1] == "s3" and (problem := bucket_problem(location[len("s3://") :].partition("/")[0])):
        yield Issue(
            "bucket-name-invalid",
            path,
            f"names no valid bucket: a name {problem}",
            location,
            "Write s3://bucket/prefix",
        )
    # S3 has no folders: a//b and a/../b are keys of their own, which no tool shows as such.
    elif scheme and scheme[1] == "s3" and not set(location.rstrip("/").split("/")[3:]).isdisjoint(_NO_FOLDERS):
        problem = "holds an empty folder, '.' or '..', which S3 takes for names"
        yield Issue("address-folders-odd", path, problem, location, f"Write {_without_odd_folders(location)}")


def _without_odd_folders(location: str) -> str:
    """The address that is probably meant: a user who writes ``..`` means the folder above."""
    bucket, _, prefix = location[len("s3://") :].partition("/")
    # The leading slash keeps ``..`` from leaving the bucket.
    below = posixpath.normpath("/" + prefix.lstrip("/"))
    return f"s3://{bucket}{below}".rstrip("/")
