"""Steps of a pipeline's definition, the training jobs in them, and expressions as an execution replaces them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm_llm.contract.job_file import JOB_CHANNEL
from sm_llm.launcher.backends.sagemaker.pipelines.known_values import expression_examples

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_GET = "Parameters."
# Every request of a training job has this block, also where it is part of another request.
_OF_TRAINING = "AlgorithmSpecification"
UNKNOWN: Any = object()
"""In place of what only an execution knows: results of other steps, and parameters without a value."""


@dataclass(frozen=True)
class DefinedJob:
    """A training job in a definition: that of a training step, or what each trial of a tuning step starts."""

    step: str
    request: Mapping[str, Any]
    ranges: Mapping[str, Any] = field(default_factory=dict)
    """Of a tuning job, as its request has them: ``{"IntegerParameterRanges": [...]}``."""

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Those that are the same in all trials."""
        return self.request.get("HyperParameters") or self.request.get("StaticHyperParameters") or {}

    @property
    def job_folder(self) -> str | None:
        """The folder in S3 with the job file; None for jobs of others, and where only an execution knows it."""
        for channel in self.request.get("InputDataConfig", ()):
            uri = channel.get("DataSource", {}).get("S3DataSource", {}).get("S3Uri")
            if channel.get("ChannelName") == JOB_CHANNEL and isinstance(uri, str):
                return f"{uri.rstrip('/')}/"
        return None


def steps_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every step in a definition or a part of it, those in the branches of conditions among them."""
    if _is_step(value):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from steps_in(child)


def jobs_of(step: Mapping[str, Any]) -> Iterator[DefinedJob]:
    """The training jobs of one step, without those of steps in its branches."""
    arguments = step["Arguments"]
    shared = arguments.get("HyperParameterTuningJobConfig", {}).get("ParameterRanges", {})
    for request in _training_jobs(arguments):
        yield DefinedJob(step.get("Name", ""), request, request.get("HyperParameterRanges") or shared)


def _is_step(value: Any) -> bool:
    return isinstance(value, dict) and "Type" in value and isinstance(value.get("Arguments"), dict)


def _training_jobs(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and _OF_TRAINING in value:
        yield value
    elif isinstance(value, dict | list) and not _is_step(value):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _training_jobs(child)


def variables_in(value: Any) -> set[str]:
    """Names of the pipeline's parameters in a part of its definition."""
    if isinstance(value, dict):
        name = value.get("Get")
        own = {name.removeprefix(_GET)} if isinstance(name, str) and name.startswith(_GET) else set()
        return own.union(*map(variables_in, value.values()))
    return set().union(*map(variables_in, value)) if isinstance(value, list | tuple) else set()


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A part of a definition as an execution has it, with ``values`` of parameters by name.

    What the service fills in is an example of it. Entries that are not known are left out; ``UNKNOWN`` where ``value``
    itself is one.
    """
    if isinstance(value, list | tuple):
        return [it for it in (filled(item, values) for item in value) if it is not UNKNOWN]
    if not isinstance(value, dict):
        return value
    if isinstance(name := value.get("Get"), str):
        if name.startswith(_GET):
            return values.get(name.removeprefix(_GET), UNKNOWN)
        return next(iter(expression_examples(value)), UNKNOWN)
    if "Std:Join" in value:
        parts = [filled(item, values) for item in value["Std:Join"]["Values"]]
        return UNKNOWN if UNKNOWN in parts else str(value["Std:Join"]["On"]).join(map(_text, parts))
    if any(str(key).startswith("Std:") for key in value):
        return UNKNOWN
    return {key: it for key, item in value.items() if (it := filled(item, values)) is not UNKNOWN}


def _text(value: Any) -> str:
    """A value as the service joins it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
