"""Parameter names as Hugging Face writes them, whatever wraps the modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

WRAPPER_WORDS = frozenset({"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod"})
"""What activation checkpointing and offloading, FSDP1 and compilation put between the parts of a name."""
# What DistributedDataParallel puts in front; inside a name it may be the model's own.
_WRAPPER_PREFIX = "module"


def plain_name(name: str) -> str:
    """``name`` without the words of wrappers."""
    parts = [part for part in name.split(".") if part not in WRAPPER_WORDS]
    # A parameter that is called ``module`` alone keeps its name.
    return ".".join(parts[1:] if parts[0] == _WRAPPER_PREFIX and len(parts) > 1 else parts)


def with_plain_names(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """Values by plain name. Raises ``ValueError`` if two of them would share one."""
    found: dict[str, T] = {}
    for name, value in named:
        plain = plain_name(name)
        if plain in found:
            raise ValueError(f"two parameters are called {plain} without the words of wrappers, one of them {name}")
        found[plain] = value
    return found
