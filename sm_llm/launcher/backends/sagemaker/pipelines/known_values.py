"""Values that a variable of a pipeline may have, as far as its definition shows them: they are checked there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_EXECUTION, _STEPS = "Execution.", "Steps."
# What the platform puts in the place of a variable of the execution, by name.
_EXAMPLES: Mapping[str, tuple[Any, ...]] = {
    # The ids are 12 characters that the service draws; one of digits alone would be the rare exception.
    "PipelineExecutionId": ("a1b2c3d4e5f6",),
    "PipelineName": ("pipeline",),
    "PipelineArn": ("arn:aws:sagemaker:us-east-1:123456789012:pipeline/name",),
    "PipelineExecutionArn": ("arn:aws:sagemaker:us-east-1:123456789012:pipeline/name/execution/a1b2c3d4e5f6",),
    "StartDateTime": ("2026-01-01T00:00:00.000Z",),
    "CurrentDateTime": ("2026-01-01T00:00:00.000Z",),
    "TrainingJobName": ("pipelines-a1b2c3d4e5f6-train-Zy9Xw8Vu7T",),
    "ProcessingJobName": ("pipelines-a1b2c3d4e5f6-prepare-Zy9Xw8Vu7T",),
}
# Values of parameters without a default: a field that takes none of them takes no value of the type. Among the large
# ones are the largest disk in GiB, and more seconds than any job may run.
_EXAMPLES_OF_TYPES: Mapping[str, tuple[Any, ...]] = {
    "Integer": (1, 2, 64, 16_384, 100_000, 10_000_000, 0),
    "Float": (0.5, 1e-4, 2.0, 1000.0, 0.0),
    "Boolean": (True, False),
}

ANY_NETWORK = {"backend.vpc.subnets": "subnet-00000000", "backend.vpc.security_group_ids": "sg-00000000"}
"""Ids of the right form, which stand for lists that a pipeline alone knows."""


@dataclass(frozen=True)
class KnownValues:
    """What is known of a variable: ``every`` value may come, of the ``examples`` one at least must be possible."""

    every: tuple[Any, ...] = ()
    """Its default, then its other choices."""
    examples: tuple[Any, ...] = ()


def known_values(variable: Any) -> KnownValues:
    """What is known of a variable of the SDK, by its default, choices, type or expression."""
    default, choices = getattr(variable, "default_value", None), getattr(variable, "enum_values", None) or ()
    if default is not None or choices:
        return KnownValues(tuple(dict.fromkeys([*([] if default is None else [default]), *choices])))
    if hasattr(variable, "on") and hasattr(variable, "values"):
        return _joined(variable)
    if found := expression_examples(getattr(variable, "expr", None)):
        return KnownValues(examples=found)
    kind = getattr(getattr(variable, "parameter_type", None), "value", "")
    return KnownValues(examples=_EXAMPLES_OF_TYPES.get(kind, ()))


def expression_examples(expression: Any) -> tuple[Any, ...]:
    """What may stand for an expression whose value only an execution knows; empty where nothing is known of it."""
    name = expression.get("Get", "") if isinstance(expression, dict) else ""
    if isinstance(name, str) and name.startswith(_EXECUTION):
        return _EXAMPLES.get(name.removeprefix(_EXECUTION), ())
    last = name.rpartition(".")[2] if isinstance(name, str) and name.startswith(_STEPS) else ""
    # The name of a job, whatever names it; the value of a metric is hardly ever a whole number.
    if last.endswith("JobName"):
        return _EXAMPLES["TrainingJobName"]
    if last == "Value" and ".FinalMetricDataList" in name:
        return 2.3456, 0.5, 1.5e-4
    return ("s3://bucket/prefix",) if is_address(expression) else ()


def _joined(join: Any) -> KnownValues:
    """The text that a ``Join`` makes of the first value of each of its parts."""
    parts, is_certain = [], True
    for part in join.values:
        found = known_values(part) if hasattr(part, "expr") else KnownValues((part,))
        is_certain &= bool(found.every)
        if not (values := found.every or found.examples):
            return KnownValues()
        parts.append(str(values[0]))
    text = str(join.on).join(parts)
    return KnownValues((text,)) if is_certain else KnownValues(examples=(text,))


def is_address(expression: Any) -> bool:
    """Whether an expression is a property of a step that holds an address in S3."""
    name = expression.get("Get", "") if isinstance(expression, dict) else ""
    last = name.rpartition(".")[2] if isinstance(name, str) else ""
    return last.endswith(("S3ModelArtifacts", "Uri")) or last.startswith("S3")


def variables_in(value: Any) -> Iterator[Any]:
    """The variables in a value: itself, or those in lists and mappings."""
    if hasattr(value, "expr"):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from variables_in(item)


def is_known(value: Any) -> bool:
    """Whether each variable in ``value`` has known values."""
    return all(known_values(it).every for it in variables_in(value))


def fillings(value: Any) -> Iterator[Any]:
    """``value`` with a known value for each variable in it: first with all defaults, then with each other choice of
    one. Entries of a list in which a variable has no known value are left out, and other values are none then."""
    if isinstance(value, list | tuple) and value and not (value := [it for it in value if is_known(it)]):
        return
    variables = list(variables_in(value))
    known = [known_values(it).every for it in variables]
    if not all(known):
        return
    first = [values[0] for values in known]
    yield _filled(value, iter(first))
    for index, values in enumerate(known):
        for other in values[1:]:
            yield _filled(value, iter([*first[:index], other, *first[index + 1 :]]))


def _filled(value: Any, values: Iterator[Any]) -> Any:
    if hasattr(value, "expr"):
        return next(values)
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    return [_filled(item, values) for item in value] if isinstance(value, list | tuple) else value
