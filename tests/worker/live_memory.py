"""Counts the bytes of tensors that are alive, as a device's allocator would, on any device and without one."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside, ``bytes`` are those of storages that operations have made and something still holds.

    Parameters and buffers of ``model`` do not count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._known = {_key(it): 0 for it in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in self._known:
                self._add(leaf)
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        self._known[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.bytes -= self._known.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
