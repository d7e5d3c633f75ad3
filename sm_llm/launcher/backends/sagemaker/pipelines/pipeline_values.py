"""Values for the variables of a stored pipeline, checked by its definition and its steps' job files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sm_llm.contract.hyperparameters import applied
from sm_llm.contract.job_file import JOB_CHANNEL, JobFile
from sm_llm.errors import Issue, SpecError, StorageError
from sm_llm.launcher.backends.sagemaker.pipelines.run_address import address_issues
from sm_llm.launcher.backends.sagemaker.pipelines.settled import PROBLEM, launched
from sm_llm.runs.run_paths import JOB_FILE
from sm_llm.spec.validation.fields import did_you_mean
from sm_llm.spec.validation.runner import blocked_by
from sm_llm.storage.uri import is_s3, parse
from sm_llm.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sm_llm.spec.validation.runner import Checker

_GET = "Parameters."
# Issues of a value by itself: its effect on the steps adds no further issue.
_OWN = (
    "pipeline-variable-unknown",
    "pipeline-value-not-a-choice",
    "pipeline-value-not-whole",
    "pipeline-value-not-a-number",
    "pipeline-value-not-boolean",
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

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The training steps of the definition."""
        return list(training_steps(self.definition.get("Steps", ())))


def check_values(given: GivenValues) -> Iterator[Issue]:
    """Names that the pipeline does not have, and values that their parameters do not take."""
    for name, value in given.values.items():
        yield from _own_issues(name, value, given.declared)


@blocked_by(*_OWN)
def check_channels(given: GivenValues) -> Iterator[Issue]:
    """Values that a channel reads from, and that are no prefix in S3."""
    texts = given.texts
    for step in given.steps:
        for channel in step["Arguments"].get("InputDataConfig", ()):
            uri = channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
            name = str(uri.get("Get", "")).removeprefix(_GET) if isinstance(uri, dict) else ""
            if name in given.values and not is_prefix(texts[name]):
                message = f"is read by the channel {channel['ChannelName']} of step {step['Name']}, and is not in S3"
                yield Issue(
                    "pipeline-value-not-in-s3", f"values.{name}", message, texts[name], "Write s3://bucket/prefix"
                )


@blocked_by(*_OWN)
def check_run_addresses(given: GivenValues) -> Iterator[Issue]:
    """Values with which the address of a run cannot be made."""
    yield from address_issues(given.steps, given.texts, given.values)


@blocked_by(*_OWN)
def check_steps(given: GivenValues) -> Iterator[Issue]:
    """Values that the worker of a step would refuse."""
    texts = given.texts
    for step in given.steps:
        used = {path: name for path, name in _variables(step["Arguments"]) if name in texts}
        # Defaults were checked when the pipeline was defined.
        if not set(used.values()) & set(given.values):
            continue
        folder = _job_folder(step["Arguments"])
        if folder is not None and (job := given.read(folder)) is not None:
            yield from _step_issues(job, used, texts, given.values)


VALUE_CHECKERS: tuple[Checker[GivenValues], ...] = (check_values, check_channels, check_run_addresses, check_steps)


def is_prefix(text: str) -> bool:
    """Whether a text is the address of a bucket, or below one."""
    try:
        return is_s3(text) and parse(text).bucket is not None
    except StorageError:
        return False


def training_steps(steps: Any) -> Iterator[dict[str, Any]]:
    """The training steps of a definition, those of the branches of conditions among them."""
    for step in steps:
        arguments = step.get("Arguments", {})
        if step.get("Type") == "Training":
            yield step
        for branch in ("IfSteps", "ElseSteps"):
            yield from training_steps(arguments.get(branch, ()))


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


def _variables(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Hyperparameter and variable, where the one is the value of the other."""
    for path, value in arguments.get("HyperParameters", {}).items():
        # A variable that is not text is joined of one part to become text.
        joined = value.get("Std:Join", {}).get("Values", [value]) if isinstance(value, dict) else []
        named = joined[0].get("Get") if len(joined) == 1 and isinstance(joined[0], dict) else None
        if isinstance(named, str) and named.startswith(_GET):
            yield path, named.removeprefix(_GET)


def _job_folder(arguments: Mapping[str, Any]) -> str | None:
    """The folder in S3 with a step's job file; None for steps of other jobs, and where only an execution knows it."""
    for channel in arguments.get("InputDataConfig", ()):
        uri = channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
        if channel.get("ChannelName") == JOB_CHANNEL and isinstance(uri, str):
            return f"{uri.rstrip('/')}/"
    return None


def _step_issues(
    job: JobFile, used: Mapping[str, str], texts: Mapping[str, str], values: Mapping[str, Any]
) -> Iterator[Issue]:
    """What the worker of a step would refuse of the values of all its variables together."""
    try:
        changed, _ = applied(job, {path: texts[name] for path, name in used.items()})
    except SpecError as error:
        for issue in error.issues:
            path = next((it for it in used if f"{issue.path}.".startswith(f"{it}.")), None)
            name = used[path] if path is not None else next(it for it in used.values() if it in values)
            yield Issue(
                "pipeline-value-invalid-in-step",
                f"values.{name}",
                f"{issue.path}: {issue.message}",
                texts[name],
                issue.remedy,
            )
        return
    if launched(changed.spec) != launched(job.spec):
        listed = ", ".join(sorted(set(used.values()) & set(values)))
        yield Issue(
            "pipeline-values-fixed-at-launch",
            "values",
            f"{listed}: {PROBLEM}",
            remedy="Write the values into the workflow and store it again",
        )
