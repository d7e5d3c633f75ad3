"""The backends by name; a module is loaded only when its backend is used. ``spec.backends.table`` has the rows."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from sm_llm.spec.backends.table import BACKENDS

if TYPE_CHECKING:
    from sm_llm.launcher.backends.base import Backend


def backend(name: str) -> Backend:
    """The backend called ``name`` (the specification already refused unknown names)."""
    module, _, attribute = BACKENDS[name].backend.partition(":")
    return cast("Backend", getattr(import_module(module), attribute)())
