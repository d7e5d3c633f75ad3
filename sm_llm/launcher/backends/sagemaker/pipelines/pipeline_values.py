"""Values for the variables of a stored pipeline, checked by its definition and its steps' job files."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JobFile
from sm_llm.errors import Issue, StorageError
from sm_llm.launcher.backends.sagemaker.pipelines.defined_jobs import UNKNOWN, filled, jobs_of, steps_in, variables_in
from sm_llm.launcher.backends.sagemaker.pipelines.job_values import (
    PublishingStep,
    job_issues,
    named_at,
    request_variables,
    step_issues,
    variables_at,
)
from sm_llm.launcher.backends.sagemaker.pipelines.run_address import address_issues
from sm_llm.launcher.backends.sagemaker.request.request import RUN_TAG
from sm_llm.runs.run_paths import JOB_FILE
from sm_llm.spec.validation.fields import did_you_mean
from sm_llm.spec.validation.runner import blocked_by
from sm_llm.storage.uri import is_s3, parse
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sm_llm.spec.validation.runner import Checker

# Issues of a value by itself: its effect on the steps adds no further issue.
_OWN = (
    "pipeline-variable-unknown",
    "pipeline-value-not-a-choice",
    "pipeline-value-not-whole",
    "pipeline-value-not-a-number",
    "pipeline-value-not-boolean",
)
# Issues of values that the request would repeat.
_ELSEWHERE = (
    "pipeline-value-invalid-in-step",
    "pipeline-values-fixed-at-launch",
    "pipeline-value-not-in-s3",
    "pipeline-value-not-an-address",
    "pipeline-address-too-long",
)


def spelt(value: Any) -> str:
    """A value as the service takes it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class GivenValues:
    """Values for the variables of a stored pipeline.

    ``read`` gives the job file in a folder in S3, or None where it cannot be read.
    """

    definition: Mapping[str, Any]
    values: Mapping[str, Any]
    read: Callable[[str], JobFile | None]

    @property
    def declared(self) -> dict[str, Mapping[str, Any]]:
        """Parameters of the definition, by name."""
        return {it["Name"]: it for it in self.definition.get("Parameters", ())}

    @property
    def texts(self) -> dict[str, str]:
        """All variables as the service would take them: those that are not given by their defaults."""
        return {name: spelt(self.values.get(name, it.get("DefaultValue", ""))) for name, it in self.declared.items()}

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """All steps of the definition, those of branches among them."""
        return list(steps_in(self.definition.get("Steps", ())))

    @cached_property
    def files(self) -> dict[str, JobFile]:
        """Job files of the steps that can be read, by their folders."""
        folders = {job.job_folder for step in self.steps for job in jobs_of(step) if job.job_folder is not None}
        return {folder: file for folder in sorted(folders) if (file := self.read(folder)) is not None}

    @cached_property
    def publishing(self) -> dict[str, PublishingStep]:
        """Training steps of ours, by name: what they publish depends on values, too."""
        found = {}
        for step in self.steps:
            address = next((it["Value"] for it in step["Arguments"].get("Tags", ()) if it.get("Key") == RUN_TAG), None)
            for job in jobs_of(step) if step["Type"] == "Training" and address is not None else ():
                if (file := self.files.get(job.job_folder or "")) is not None:
                    found[job.step] = PublishingStep(address, job, file)
        return found

    @cached_property
    def before(self) -> dict[str, Any]:
        """The values that the definition was checked with: defaults, each of its type."""
        return {
            name: _typed(it.get("Type"), spelt(it["DefaultValue"]))
            for name, it in self.declared.items()
            if "DefaultValue" in it
        }

    @cached_property
    def known(self) -> dict[str, Any]:
        """The values of the start, each of its type."""
        given = {name: _typed(self.declared[name].get("Type"), spelt(it)) for name, it in self.values.items()}
        return {**self.before, **given}


def check_values(given: GivenValues) -> Iterator[Issue]:
    """Names that the pipeline does not have, and values that their parameters do not take."""
    for name, value in given.values.items():
        yield from _own_issues(name, value, given.declared)


@blocked_by(*_OWN)
def check_channels(given: GivenValues) -> Iterator[Issue]:
    """Values that a channel reads from, and that are no prefix in S3."""
    for step in given.steps:
        for job in jobs_of(step):
            for channel in job.request.get("InputDataConfig", ()):
                uri = channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
                names, location = sorted(variables_in(uri) & set(given.values)), filled(uri, given.known)
                if names and location is not UNKNOWN and not is_prefix(str(location)):
                    message = f"is read by the channel {channel['ChannelName']} of step {job.step}, and is not in S3"
                    remedy = "Write s3://bucket/prefix"
                    yield Issue("pipeline-value-not-in-s3", f"values.{names[0]}", message, str(location), remedy)


@blocked_by(*_OWN)
def check_run_addresses(given: GivenValues) -> Iterator[Issue]:
    """Values with which the address of a run cannot be made."""
    yield from address_issues(given.steps, given.texts, given.values)


@blocked_by(*_OWN)
def check_jobs(given: GivenValues) -> Iterator[Issue]:
    """Values with which a job's plan, or its worker, would refuse what it is given."""
    for step in given.steps:
        for job in jobs_of(step):
            paths, folder = variables_at(job), job.job_folder
            # Defaults were checked when the pipeline was defined.
            if folder is None or not set().union(*paths.values()) & set(given.values):
                continue
            if (file := given.files.get(folder)) is not None:
                for issue in job_issues(job, file, given.known, given.before, given.publishing):
                    yield _of_values(issue, given, paths)


@blocked_by(*_OWN, *_ELSEWHERE)
def check_requests(given: GivenValues) -> Iterator[Issue]:
    """Values that the service would refuse in the request of a step of ours."""
    for step in given.steps:
        if any(job.job_folder is not None for job in jobs_of(step)):
            paths = dict(request_variables(step["Arguments"]))
            for issue in step_issues(step, given.known, given.before):
                yield _of_values(issue, given, paths)


VALUE_CHECKERS: tuple[Checker[GivenValues], ...] = (
    check_values,
    check_channels,
    check_run_addresses,
    check_jobs,
    check_requests,
)


def is_prefix(text: str) -> bool:
    """Whether a text is the address of a bucket, or below one."""
    try:
        return is_s3(text) and parse(text).bucket is not None
    except StorageError:
        return False


def job_in(folder: str) -> JobFile | None:
    """The job file in a folder in S3. Where it cannot be read that is printed, and the worker checks alone."""
    from sm_llm.storage.uri import open_store

    try:
        body = open_store(folder).get(JOB_FILE)
        return None if body is None else JobFile.model_validate_json(body)
    except (StorageError, ValueError) as error:
        reason = str(error).splitlines()[0]
        echo(f"  warning: {folder}{JOB_FILE} cannot be read, so values are not checked: {reason}", err=True)
        return None


def _own_issues(name: str, value: Any, declared: Mapping[str, Mapping[str, Any]]) -> Iterator[Issue]:
    path, found = f"values.{name}", declared.get(name)
    if found is None:
        listed = f"Known: {', '.join(declared)}" if declared else "It has none"
        yield Issue(
            "pipeline-variable-unknown",
            path,
            "the pipeline has no such variable",
            value,
            f"{did_you_mean(name, declared)} {listed}".strip(),
        )
        return
    kind, text, allowed = found.get("Type"), spelt(value), found.get("EnumValues")
    if allowed and text not in map(spelt, allowed):
        yield Issue(
            "pipeline-value-not-a-choice",
            path,
            "is not one of its values",
            value,
            f"Write one of {', '.join(map(spelt, allowed))}",
        )
    elif kind == "Integer" and not _reads_as(int, text):
        yield Issue("pipeline-value-not-whole", path, "must be a whole number", value, "Write for example 100")
    elif kind == "Float" and not _reads_as(float, text):
        yield Issue("pipeline-value-not-a-number", path, "must be a number", value, "Write for example 1e-4")
    elif kind == "Boolean" and text.lower() not in ("true", "false"):
        yield Issue("pipeline-value-not-boolean", path, "must be true or false", value, "Write true or false")


def _reads_as(kind: type[int] | type[float], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _typed(kind: Any, text: str) -> Any:
    """The text of a value as the service puts it where a parameter of that type stands alone."""
    if kind == "Boolean":
        return text.lower() == "true"
    return int(text) if kind == "Integer" else float(text) if kind == "Float" else text


def _of_values(issue: Issue, given: GivenValues, paths: Mapping[str, set[str]]) -> Issue:
    """An issue of a job or a request as one of the value that leads to it."""
    used = sorted(set().union(*paths.values()) & set(given.values))
    if issue.path == "values":
        return replace(issue, message=f"{', '.join(used)}: {issue.message}")
    name = named_at(issue.path, paths, given.values) or (used[0] if len(used) == 1 else None)
    message = f"{issue.path}: {issue.message}"
    # An issue of several values together names all that may be the cause.
    path, message = ("values", f"{', '.join(used)}: {message}") if name is None else (f"values.{name}", message)
    value: dict[str, Any] = {} if name is None else {"value": given.texts[name]}
    return Issue("pipeline-value-invalid-in-step", path, message, remedy=issue.remedy, **value)
