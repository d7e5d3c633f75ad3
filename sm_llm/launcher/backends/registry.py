"""The backends by name; a module is loaded only when its backend is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from sm_llm.launcher.backends.base import Backend

BACKENDS = {
    "local": "sm_llm.launcher.backends.local.backend:LocalBackend",
    "sagemaker": "sm_llm.launcher.backends.sagemaker.backend:SageMakerBackend",
}


def backend(name: str) -> Backend:
    """The backend called ``name`` (the spec already refused unknown names)."""
    module, _, attribute = BACKENDS[name].partition(":")
    return cast("Backend", getattr(import_module(module), attribute)())
