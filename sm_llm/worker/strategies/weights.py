"""Where a parameter's first value comes from: the family's distribution, or a trained model's safetensors files."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from sm_llm.convert.conversion_jobs import Given, assumed_layout, open_model
from sm_llm.convert.files.views import FORMATS
from sm_llm.errors import CheckpointError, ConversionError
from sm_llm.models.init_weights import initial_slice
from sm_llm.models.safetensors_folder import START

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.models.families.family import Tensor
    from sm_llm.models.weights_check import CheckedWeights

# What torch takes from numpy, by bytes of an element.
_SIGNED = {8: np.int64, 4: np.int32, 2: np.int16}


class WeightReader(Protocol):
    """Reads one slice of one parameter."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """``[offsets, offsets + sizes)`` of parameter ``name`` on the CPU, in any float format."""


class InitialWeights:
    """A pure function of (seed, parameter name): the same bits for any sharding, and any number of cores.

    All cores of the node draw, as many for each of its ``sharers``.
    """

    def __init__(self, tensors: Mapping[str, Tensor], seed: int, sharers: int = 1) -> None:
        self._tensors = tensors
        self._seed = seed
        self._threads = max(1, len(os.sched_getaffinity(0)) // sharers)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, thread_name_prefix="initial-weights")

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        tensor, run = self._tensors[name], self._pool.map if self._threads > 1 else map
        values = initial_slice(self._seed, name, tensor.shape, tensor, tuple(offsets), tuple(sizes), run=run)
        return torch.from_numpy(values)


class PretrainedWeights:
    """The safetensors files of a Hugging Face model folder, read slice by slice.

    Raises ``CheckpointError`` with everything that is wrong with files that are damaged or not those of the model.
    """

    def __init__(self, folder: Path, checked: CheckedWeights) -> None:
        if checked.issues:
            raise CheckpointError("\n".join(map(str, checked.issues)))
        self.folder = folder
        # Tensors in the files that the model computes itself.
        self.unread = checked.unread
        self._tensors = checked.tensors
        self._open: dict[Path, Any] = {}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """See ``WeightReader``. Raises ``CheckpointError`` for values that are not finite."""
        view = self._handle(self._tensors[name].file).get_slice(name)
        part: torch.Tensor = view[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        # The extremes need no memory of their own; only where they are not finite are the elements looked up.
        if part.numel() and not all(bool(extreme.isfinite()) for extreme in part.aminmax()):
            index = [int(i) + o for i, o in zip(part.isfinite().logical_not().nonzero()[0], offsets, strict=True)]
            raise CheckpointError(
                f"{START}: {self._tensors[name].file}: {name} holds NaN or infinity, first at {index}. "
                "Fetch the file again, or name an earlier, undamaged version of the weights"
            )
        return part

    def _handle(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


class ShardedWeights:
    """The shards of a model that was cut for neuronx-distributed, read slice by slice, for any degrees.

    Raises ``CheckpointError`` with everything that is wrong with shards that are damaged or not those of the model.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], *, compares_copies: bool = True) -> None:
        """``compares_copies``: what several ranks hold must be equal; once per node, since all of it is read."""
        try:
            model = open_model(folder)
            for name in model.joined.copied() if compares_copies else ():
                model.joined.check_copies(name)
        except ConversionError as error:
            raise CheckpointError(f"{START}: {error}") from error
        self.notes = assumed_layout(model.found, model.plan.degrees, Given())
        """What is taken for granted of the shards, for people."""
        self._joined, found = model.joined, model.plan.shapes
        wrong = [name for name in tensors.keys() | found.keys() if _shape(tensors.get(name)) != found.get(name)]
        if wrong:
            raise CheckpointError(f"{START}: the shards in {folder} have other tensors: {', '.join(sorted(wrong)[:6])}")

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """See ``WeightReader``. Raises ``CheckpointError`` for values that are not finite."""
        raw, dtype = np.ascontiguousarray(self._joined.read(name, offsets, sizes)), self._joined.dtype(name)
        part = torch.from_numpy(raw.view(_SIGNED[raw.dtype.itemsize])).view(getattr(torch, FORMATS[dtype].dtype))
        if part.numel() and not all(bool(extreme.isfinite()) for extreme in part.aminmax()):
            raise CheckpointError(f"{START}: {name} of the shards holds NaN or infinity. Convert the weights again")
        return part


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.shape
