"""Published tensors that the transformers model keeps under another name, or several in one parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sm_llm.models.families.family import Packing, Tensor
    from sm_llm.worker.strategies.weights import WeightReader


class PackedWeights:
    """Reads slices of a model's parameters from published tensors (``WeightReader``): only what a slice touches."""

    def __init__(self, source: WeightReader, packings: Mapping[str, Packing], tensors: Mapping[str, Tensor]) -> None:
        self._source = source
        self._packings = packings
        self._tensors = tensors

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        packing = self._packings.get(name)
        if packing is None:
            return self._source.read(name, offsets, sizes)
        if not packing.stacked:
            return self._joined(packing.parts[0], offsets, sizes)
        parts = packing.parts[offsets[0] : offsets[0] + sizes[0]]
        # A process may hold none of a stack that has fewer members than there are processes.
        if not parts:
            return torch.empty(tuple(sizes))
        return torch.stack([self._joined(names, offsets[1:], sizes[1:]) for names in parts])

    def _joined(self, names: Sequence[str], offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A slice of tensors that lie one behind the other."""
        first, last = offsets[0], offsets[0] + sizes[0]
        found, begin = [], 0
        for name in names:
            end = begin + self._tensors[name].shape[0]
            # The slice and the tensor overlap in this range of the whole.
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                found.append(self._source.read(name, (start - begin, *offsets[1:]), (stop - start, *sizes[1:])))
            begin = end
        if not found:
            return torch.empty(tuple(sizes))
        return found[0] if len(found) == 1 else torch.cat(found)


def unpacked(
    name: str, whole: torch.Tensor, packing: Packing | None, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A whole parameter as published tensors; an empty one (on a process that gathers nothing) as empty ones."""
    if packing is None:
        yield name, whole
        return
    for number, names in enumerate(packing.parts):
        joined = whole[number] if packing.stacked and whole.numel() else whole
        begin = 0
        for part in names:
            end = begin + tensors[part].shape[0]
            yield part, joined[begin:end]
            begin = end
