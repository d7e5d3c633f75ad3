"""Where a parameter's first value comes from: the family's distribution, or a trained model's safetensors files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

import torch

from sm_llm.errors import CheckpointError
from sm_llm.models.init_weights import initial_slice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from sm_llm.models.family import Tensor

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


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

    Raises ``CheckpointError`` when the folder has none, or when names or shapes are not those of ``tensors``.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._files = _weight_files(folder)
        self._check(tensors)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        view = self._handle(self._files[name]).get_slice(name)
        part: torch.Tensor = view[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        return part

    def _handle(self, path: Path) -> Any:
        from safetensors import safe_open

        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        missing = sorted(set(tensors) - set(self._files))
        if missing:
            raise CheckpointError(f"start.pretrained: {self.folder} lacks {_some(missing)}, which the model needs")
        for name, tensor in tensors.items():
            found = tuple(self._handle(self._files[name]).get_slice(name).get_shape())
            if found != tensor.shape:
                raise CheckpointError(
                    f"start.pretrained: {name} in {self.folder} has shape {list(found)}, "
                    f"the model's config says {list(tensor.shape)}"
                )


def _weight_files(folder: Path) -> dict[str, Path]:
    """Parameter name -> file. The index is trusted, not the file names."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    single = folder / SINGLE_FILE
    if not single.is_file():
        raise CheckpointError(
            f"start.pretrained: {folder} has neither {SINGLE_FILE} nor {INDEX_FILE}. "
            "Pickled weights (.bin, .pt) are not read: save the model with safetensors"
        )
    from safetensors import safe_open

    with safe_open(single, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), single)


def _some(names: Sequence[str], shown: int = 3) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
