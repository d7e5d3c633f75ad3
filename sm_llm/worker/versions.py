"""The versions of what a result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("sm_llm", "torch", "transformers", "tokenizers", "numpy", "pyarrow", "safetensors")


def versions() -> dict[str, str]:
    """Installed versions of Python and the packages that compute; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
