"""The versions of what a result depends on."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("sm_llm", "torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors")


def versions() -> dict[str, str]:
    """Installed versions of Python and the packages that compute; absent ones are left out."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    """Read once: every save records them, and reading them takes tens of milliseconds."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
