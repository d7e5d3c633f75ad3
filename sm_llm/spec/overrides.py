"""Changes to a specification: ``key.path=value`` with a YAML value, and the same paths with Python values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sm_llm.errors import Fault, SpecError
from sm_llm.spec.tree import Path, Tree, from_python
from sm_llm.spec.yaml_text import from_typed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OVERRIDE_ORIGIN = "override"
FIELD_ORIGIN = "Python argument"


def parse_overrides(overrides: Sequence[str]) -> tuple[list[tuple[Path, Tree]], list[Fault]]:
    """Paths and values of ``key.path=value`` texts, in order, and a fault for each that is not one."""
    parsed, faults = [], []
    for text in overrides:
        key, equals, value = text.partition("=")
        path = _path(key)
        if not (equals and path and not key.startswith("-")):
            faults.append(Fault(key or text, "an override is written key.path=value", text, _example(key, equals)))
            continue
        try:
            parsed.append((path, from_typed(value, OVERRIDE_ORIGIN)))
        except SpecError as error:
            faults += [replace(fault, path=key) for fault in error.faults]
    return parsed, faults


def parse_fields(fields: Mapping[str, Any]) -> tuple[list[tuple[Path, Tree]], list[Fault]]:
    """Paths and values of Python fields: ``{"task.max_steps": 10}`` or ``{"task": {"max_steps": 10}}``."""
    parsed, faults = [], []
    for key, value in fields.items():
        if path := _path(key):
            try:
                parsed.append((path, from_python(value, FIELD_ORIGIN)))
            except SpecError as error:
                faults += [replace(fault, path=f"{key}.{fault.path}".rstrip(".")) for fault in error.faults]
        else:
            faults.append(Fault(key, "a field is named by a dotted path such as task.max_steps"))
    return parsed, faults


def _path(key: str) -> Path | None:
    parts = tuple(key.strip().split("."))
    return parts if all(parts) else None


def _example(key: str, equals: str) -> str:
    if key.startswith("-"):
        return "Options of the program go by their own names (--help lists them)"
    return "For example task.max_steps=100" if equals else f"For example {key}=VALUE"
