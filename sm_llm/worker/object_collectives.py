"""Objects that torch passes between the processes of a job: read by an unpickler that knows harmless classes alone.

torch's object collectives, which its distributed checkpoints use as well, are pickles. Their connections are arranged
through a key-value store that another user of the machine may reach.
"""

from __future__ import annotations

import builtins
import enum
import pickle
import sys
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from pydantic import BaseModel

from sm_llm.worker.unpickling import CarefulUnpickler

_CHECKPOINTS = "torch.distributed.checkpoint."
_NAMED = {
    "builtins": {"set", "frozenset", "slice", "range", "bytearray", "complex"},
    "collections": {"OrderedDict", "deque"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},  # looks a name up in a table
    "torch.distributed.checkpoint.api": {"CheckpointException"},
    "traceback": {"StackSummary", "FrameSummary"},
}
# Modules of torch whose dataclasses and enumerations are the plans and results of a distributed checkpoint.
_PLAIN = {f"{_CHECKPOINTS}{name}" for name in ("metadata", "planner", "filesystem", "storage")}


class UnknownError(Exception):
    """An error of a class that is not taken over from another process."""


class ObjectUnpickler(CarefulUnpickler):
    """Knows plain values, errors, and the data classes of distributed checkpoints and of this package."""

    def known(self, module: str, name: str) -> Any:
        # Listed one by one, since these are neither data classes nor enumerations.
        if name in _NAMED.get(module, ()):
            return getattr(import_module(module), name)
        found = getattr(sys.modules.get(module), name, None)  # nothing is imported, and no dotted name is followed
        if module == "torch" and isinstance(found, torch.dtype):
            return found
        # A class counts where it was defined: a module also gives access to everything that it imports.
        if isinstance(found, type) and found.__module__ == module and _is_plain(found, module):
            return found
        # An error of a class that is not loaded here must not hide that the other process has failed.
        if name.endswith(("Error", "Exception", "Warning")) and "." not in name:
            return UnknownError
        raise pickle.UnpicklingError(f"a message of another process refers to {module}.{name}, which none may hold")


def _is_plain(kind: type, module: str) -> bool:
    """Whether making such an object does nothing but keep values."""
    if issubclass(kind, BaseException):
        return module == builtins.__name__ or module.startswith("sm_llm.")
    if module in _PLAIN or module.startswith("sm_llm."):
        return is_dataclass(kind) or issubclass(kind, enum.Enum | BaseModel)
    return False


def restrict_object_collectives() -> None:
    """Let torch's object collectives of this process read with ``ObjectUnpickler`` from now on."""
    # A private name of torch. Without it the restriction would silently do nothing.
    if not hasattr(c10d, "_unpickler"):
        raise RuntimeError(f"torch {torch.__version__} reads messages in a way that cannot be restricted")
    c10d._unpickler = ObjectUnpickler
