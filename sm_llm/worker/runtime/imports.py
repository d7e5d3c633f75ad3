"""Imports of large libraries, without the searches for garbage that take a fifth of their time."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, Python collects no garbage, and never looks again at the objects that are there at the end.

    An import of torch or transformers makes a million objects, which all stay.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()
