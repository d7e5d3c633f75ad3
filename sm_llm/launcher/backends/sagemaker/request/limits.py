"""Limits of the service that its own model holds: lengths, counts, patterns and enumerations of a request.

The SDK and botocore check types, required members and minimums only; everything else is refused by the service, after
code and data have been uploaded. This follows the installed botocore, so it knows an API as new as that.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Issue, SubmitError
from sm_llm.optional import missing
from sm_llm.storage.s3 import s3_client

if TYPE_CHECKING:
    from collections.abc import Iterator

_JAVA = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{Alnum}": "A-Za-z0-9"}
"""Java's classes of characters as Python's; ``\\w`` is a little wider than letters, and the service decides."""


def limit_issues(request: dict[str, Any], operation: str = "CreateTrainingJob") -> Iterator[Issue]:
    """Every limit that a request breaks, by its path in the request (``ResourceConfig.InstanceCount``)."""
    yield from _walk(_input_shape(operation), request, "")


def value_issues(place: str, value: Any, path: str, operation: str = "CreateTrainingJob") -> Iterator[Issue]:
    """Types that a value at ``place`` of a request may not have, else limits that it breaks; ``path`` is its name.

    ``place`` is dotted, with ``*`` for an entry of a list.
    """
    from botocore.validate import ParamValidator

    shape = _input_shape(operation)
    for name in place.split("."):
        shape = shape.member if name == "*" else shape.members.get(name)
        if shape is None:
            yield Issue(
                "request-value-unknown",
                path,
                "the installed botocore does not know this",
                value,
                "Install a newer boto3",
            )
            return
    found = ParamValidator().validate(value, shape)
    if found.has_errors():
        yield Issue(
            "request-value-not-sendable",
            path,
            f"cannot be sent: {'; '.join(found.generate_report().splitlines())}",
            value,
        )
    else:
        yield from _walk(shape, value, path)


def known_values(shape: str) -> tuple[str, ...]:
    """What an enumeration of the service holds, e.g. ``TrainingInstanceType``."""
    return tuple(_model().shape_for(shape).enum)


def fresh_session() -> Any:
    """``s3_client.fresh_session``. Raises ``SubmitError`` where boto3 is not installed."""
    need_aws()
    return s3_client.fresh_session()


def need_aws() -> None:
    """Raise ``SubmitError`` where boto3 is not installed: nothing of AWS can be asked or read then."""
    if (lack := missing("boto3", "botocore")) is not None:
        raise SubmitError(f"AWS: {lack}")


@lru_cache
def _model() -> Any:
    return fresh_session().get_service_model("sagemaker")


def _input_shape(operation: str) -> Any:
    return _model().operation_model(operation).input_shape


def _walk(shape: Any, value: Any, path: str) -> Iterator[Issue]:
    if shape.type_name == "structure":
        yield from _structure(shape, value, path)
    elif shape.type_name == "list":
        yield from _size(shape, len(value), path, "entries", len(value))
        for index, item in enumerate(value):
            yield from _walk(shape.member, item, f"{path}.{index}")
    elif shape.type_name == "map":
        yield from _size(shape, len(value), path, "entries", len(value))
        for key, item in value.items():
            yield from _text(shape.key, key, f"{path}.{key}", "name ")
            yield from _walk(shape.value, item, f"{path}.{key}")
    elif shape.type_name == "string":
        yield from _text(shape, value, path)
    elif shape.type_name in ("integer", "long") and not isinstance(value, bool):
        yield from _size(shape, value, path, "", value)


def _structure(shape: Any, value: dict[str, Any], path: str) -> Iterator[Issue]:
    for name in shape.required_members:
        if name not in value:
            yield Issue("request-field-missing", _join(path, name), "missing")
    for name, item in value.items():
        member = shape.members.get(name)
        if member is None:
            yield Issue(
                "request-field-unknown",
                _join(path, name),
                "the installed botocore does not know this",
                remedy="Install a newer boto3",
            )
        else:
            yield from _walk(member, item, _join(path, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _size(shape: Any, size: float, path: str, unit: str, seen: Any) -> Iterator[Issue]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    counted = f"has {size:g} {unit}; " if unit else ""
    if most is not None and size > most:
        yield Issue("request-value-too-large", path, f"{counted}the service takes at most {most:,}", seen)
    elif least is not None and size < least:
        yield Issue("request-value-too-small", path, f"{counted}the service takes at least {least:,}", seen)


def _text(shape: Any, text: Any, path: str, what: str = "") -> Iterator[Issue]:
    if not isinstance(text, str):
        yield Issue("request-text-expected", path, "is no text", text)
        return
    pattern = shape.metadata.get("pattern")
    if pattern and not _matches(pattern, text):
        yield Issue("request-text-form", path, f"{what}does not have the form {pattern}", text)
    else:
        yield from _size(shape, len(text), path, f"characters{' in its name' if what else ''}", text)
    allowed = getattr(shape, "enum", ())
    if allowed and shape.name != "TrainingInstanceType" and text not in allowed:
        yield Issue("request-text-not-a-choice", path, f"is none of {', '.join(allowed)}", text)


def _matches(pattern: str, text: str) -> bool:
    """Whether the whole text has the form. ``.`` takes line breaks: whether the service does is not documented."""
    return re.fullmatch(_python_pattern(pattern), text, re.DOTALL) is not None


def _python_pattern(pattern: str) -> str:
    for java, python in _JAVA.items():
        pattern = pattern.replace(java, python)
    return pattern
