"""References between jobs: ``inputs.NAME`` and ``steps.NAME.output`` become places that can be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, SpecError
from sm_llm.spec.base import SpecModel, location_use
from sm_llm.spec.inputs import Input, S3Input, input_location
from sm_llm.spec.job import JobSpec, StepSpec, WorkflowSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from sm_llm.spec.base import LocationUse

# The whole text must match: inputs.x inside a longer text is a name like any other.
_REFERENCE = re.compile(r"(?:inputs\.(?P<input>[\w-]+)|steps\.(?P<step>[\w-]+)\.output)(?P<rest>/.*)?")


def resolve(job: JobSpec, inputs: Mapping[str, str], steps: Mapping[str, str]) -> JobSpec:
    """The same job with every reference in its task and inputs replaced by a place.

    Args:
        job: a job whose strings may be ``inputs.NAME[/sub]`` or ``steps.NAME.output[/sub]``.
        inputs: where each input lies for the reader; an input not named here is at its place in ``job.inputs``.
        steps: where each earlier step published its output.

    Raises:
        SpecError: references to inputs or steps that are not given, all at once.
    """
    issues: list[Issue] = []
    # Inputs come first: the task may refer to them, and they to steps.
    own = {name: _resolved_input(name, value, steps, issues) for name, value in job.inputs.items()}
    # Where the reader has an input counts before where it came from.
    locations = {**{name: input_location(value) for name, value in own.items()}, **inputs}
    task = _map_strings(
        job.task.model_dump(), "task", lambda path, text: _replace(path, text, locations, steps, issues)
    )
    if issues:
        raise SpecError(issues)
    # Validated here, because ``model_copy`` takes any value as it is.
    return job.model_copy(update={"task": type(job.task).model_validate(task), "inputs": own})


def referring(job: JobSpec, outputs: Mapping[str, str]) -> JobSpec:
    """The reverse of ``resolve``: each location in, or below, the output of a step becomes a reference to it.

    ``outputs`` has where each step publishes, by name.
    """

    def change(_: str, text: str) -> str:
        for name, output in outputs.items():
            if text == output or text.startswith(f"{output}/"):
                return f"steps.{name}.output{text[len(output) :]}"
        return text

    inputs: dict[str, Input] = {}
    for name, value in job.inputs.items():
        if isinstance(value, S3Input):
            inputs[name] = value.model_copy(update={"uri": change(name, value.uri)})
        else:
            inputs[name] = change(name, value) if isinstance(value, str) else value
    task = _map_strings(job.task.model_dump(), "task", change)
    return job.model_copy(update={"task": type(job.task).model_validate(task), "inputs": inputs})


def is_reference(text: str) -> bool:
    """Whether ``text`` is ``inputs.NAME[/sub]`` or ``steps.NAME.output[/sub]``."""
    return _REFERENCE.fullmatch(text) is not None


def references(job: JobSpec | StepSpec) -> list[tuple[str, str, str]]:
    """Every reference of a job: dotted path, ``"input"`` or ``"step"``, and the name referred to."""
    found: list[tuple[str, str, str]] = []

    def note(path: str, text: str) -> str:
        if match := _REFERENCE.fullmatch(text):
            kind = "input" if match["input"] else "step"
            found.append((path, kind, match[kind]))
        return text

    for name, value in job.inputs.items():
        note(f"inputs.{name}", input_location(value))
    _map_strings(job.task.model_dump(), "task", note)
    return found


def sources(job: JobSpec) -> dict[str, str]:
    """Every place the task reads: dotted path (``task.data.train``, ``task.sources.0``) -> folder, file or URI."""
    return {path: location for path, _, _, location in source_fields(job.task)}


def source_fields(task: SpecModel) -> Iterator[tuple[str, SpecModel, str, str]]:
    """Every place that ``task`` reads: its dotted path, the block and the field that hold it, the place."""
    return _locations(task, "task", "source")


def patterns(job: JobSpec) -> dict[str, str]:
    """Every pattern of files that the task reads, by dotted path."""
    return {path: location for path, _, _, location in _locations(job.task, "task", "pattern")}


def outputs(job: JobSpec) -> dict[str, str]:
    """Every place beside the storage that the task writes to, by dotted path."""
    return {path: location for path, _, _, location in _locations(job.task, "task", "output")}


def workflow_job(workflow: WorkflowSpec, step: str) -> JobSpec:
    """One step of a workflow as a job of its own, named ``<workflow>-<step>``.

    Compute comes from the step or else the workflow; the step's environment and secrets go over the workflow's.
    References to other steps stay in it until ``resolve``.
    """
    spec = workflow.steps[step]
    return JobSpec(
        name=f"{workflow.name}-{step}",
        task=spec.task,
        compute=spec.compute or workflow.compute,
        backend=workflow.backend,
        storage=workflow.storage,
        storage_options=workflow.storage_options,
        inputs=spec.inputs,
        environment={**workflow.environment, **spec.environment},
        secrets={**workflow.secrets, **spec.secrets},
    )


def step_dependencies(workflow: WorkflowSpec, step: str) -> set[str]:
    """Names of the steps that must finish before ``step``: those in ``after`` and those it refers to."""
    spec = workflow.steps[step]
    # What a step refers to must be there before it begins, so a reference is an order, too.
    return set(spec.after) | {name for _, kind, name in references(spec) if kind == "step"}


def texts(job: JobSpec) -> dict[str, str]:
    """Every text in the task, by dotted path: whatever a task is given, arguments of a program among it."""
    found: dict[str, str] = {}

    def note(path: str, text: str) -> str:
        return found.setdefault(path, text)

    _map_strings(job.task.model_dump(), "task", note)
    return found


def _replace(path: str, text: str, inputs: Mapping[str, str], steps: Mapping[str, str], issues: list[Issue]) -> str:
    match = _REFERENCE.fullmatch(text)
    if not match:
        return text
    table, name = (inputs, match["input"]) if match["input"] else (steps, match["step"])
    if name not in table:
        known = ", ".join(sorted(table)) or "none"
        issues.append(
            Issue("reference-unknown", path, "refers to something that is not there", text, f"Known: {known}")
        )
        return text
    return table[name].rstrip("/") + match["rest"] if match["rest"] else table[name]


def _resolved_input(name: str, value: Input, steps: Mapping[str, str], issues: list[Issue]) -> Input:
    if isinstance(value, str):
        # No inputs are given to it: an input cannot refer to another one.
        return _replace(f"inputs.{name}", value, {}, steps, issues)
    if isinstance(value, S3Input):
        return value.model_copy(update={"uri": _replace(f"inputs.{name}.uri", value.uri, {}, steps, issues)})
    return value


def _map_strings(value: Any, path: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, str):
        return change(path, value)
    if isinstance(value, dict):
        return {key: _map_strings(item, f"{path}.{key}", change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item, f"{path}.{index}", change) for index, item in enumerate(value)]
    return value


def _locations(block: SpecModel, path: str, use: LocationUse) -> Iterator[tuple[str, SpecModel, str, str]]:
    for name, field in type(block).model_fields.items():
        value = getattr(block, name)
        here = f"{path}.{name}"
        if isinstance(value, SpecModel):
            yield from _locations(value, here, use)
        elif location_use(field) != use:
            continue
        elif isinstance(value, str):
            yield here, block, name, value
        elif isinstance(value, list):
            yield from ((f"{here}.{index}", block, name, item) for index, item in enumerate(value))
