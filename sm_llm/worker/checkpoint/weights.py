"""Where a parameter's first value comes from: the family's distribution, or a trained model's safetensors files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from sm_llm.errors import CheckpointError
from sm_llm.models.init_weights import initial_slice
from sm_llm.models.safetensors_folder import START

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.models.families.family import Tensor
    from sm_llm.models.weights_check import CheckedWeights


class WeightReader(Protocol):
    """Reads one slice of one parameter."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """``[offsets, offsets + sizes)`` of parameter ``name`` on the CPU, in any float format."""


class InitialWeights:
    """A pure function of (seed, parameter name): the same bits for any sharding."""

    def __init__(self, tensors: Mapping[str, Tensor], seed: int) -> None:
        self._tensors = tensors
        self._seed = seed

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        tensor = self._tensors[name]
        return torch.from_numpy(initial_slice(self._seed, name, tensor.shape, tensor, tuple(offsets), tuple(sizes)))


class PretrainedWeights:
    """The safetensors files of a Hugging Face model folder, read slice by slice.

    Raises ``CheckpointError`` with everything that is wrong with files that are damaged or not those of the model.
    """

    def __init__(self, folder: Path, checked: CheckedWeights) -> None:
        if checked.faults:
            raise CheckpointError("\n".join(map(str, checked.faults)))
        self.folder = folder
        self.unread = checked.unread
        """Tensors in the files that the model computes itself."""
        self._tensors = checked.tensors
        self._open: dict[Path, Any] = {}

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """See ``WeightReader``. Raises ``CheckpointError`` for values that are not finite."""
        view = self._handle(self._tensors[name].file).get_slice(name)
        part: torch.Tensor = view[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        # The extremes need no memory of their own; only where they are not finite are the elements looked up.
        if part.numel() and not all(bool(extreme.isfinite()) for extreme in part.aminmax()):
            place = [int(i) + o for i, o in zip(part.isfinite().logical_not().nonzero()[0], offsets, strict=True)]
            raise CheckpointError(
                f"{START}: {self._tensors[name].file}: {name} holds NaN or infinity, first at {place}. "
                "Fetch the file again, or name an earlier, sound version of the weights"
            )
        return part

    def _handle(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]
