"""A specification as a table: every value and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.spec.loading.load import Loaded

DEFAULT_ORIGIN = "default"

Row = tuple[str, Any, str]
"""Dotted path, value, origin."""


def show(loaded: Loaded) -> list[Row]:
    """Every leaf of the merged specification in its own order, then the user's defaults that are set.

    Lists and empty mappings are leaves. A value nobody wrote has the origin ``default``.
    """
    leaves = _leaves(loaded.spec.model_dump())
    spec = [(path, value, loaded.origins.get(path, DEFAULT_ORIGIN)) for path, value in leaves]
    origins = loaded.defaults.origins
    user = [(path, value) for path, value in _leaves(loaded.defaults.values.model_dump()) if path in origins]
    return [*spec, *((f"user defaults: {path}", value, origins[path]) for path, value in user)]


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        path = f"{prefix}{key}"
        if isinstance(item, dict) and item:
            yield from _leaves(item, f"{path}.")
        else:
            yield path, list(item) if isinstance(item, tuple) else item
