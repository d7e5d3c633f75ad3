"""Parameters that are made of several published tensors: any slice, and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.models.families.family import Packing, Tensor
from sm_llm.worker.strategies.packed import PackedWeights, unpacked
from sm_llm.worker.strategies.weights import InitialWeights
from tests.fixtures.sampling import number

TENSORS = {
    f"expert.{number}.{name}": Tensor(shape, "matrix", "normal", 1.0)
    for number in range(3)
    for name, shape in {"gate": (5, 4), "up": (3, 4)}.items()
}
STACK = Packing(tuple((f"expert.{number}.gate", f"expert.{number}.up") for number in range(3)), stacked=True)
RENAMED = Packing((("expert.1.up",),))
PACKINGS = {"experts": STACK, "renamed": RENAMED}


def reader() -> PackedWeights:
    return PackedWeights(InitialWeights(TENSORS, seed=1), PACKINGS, TENSORS)


def whole() -> torch.Tensor:
    source = InitialWeights(TENSORS, seed=1)
    read = {name: source.read(name, (0, 0), it.shape) for name, it in TENSORS.items()}
    return torch.stack([torch.cat([read[f"expert.{it}.gate"], read[f"expert.{it}.up"]]) for it in range(3)])


def test_shapes_are_those_of_the_pack() -> None:
    assert STACK.tensor(TENSORS).shape == (3, 8, 4)
    assert RENAMED.tensor(TENSORS).shape == (3, 4)


@settings(max_examples=number(60, whole=600))
@given(st.data())
def test_any_slice_is_that_of_the_whole(data: st.DataObject) -> None:
    bounds = []
    for length in (3, 8, 4):
        start = data.draw(st.integers(0, length))
        bounds.append((start, data.draw(st.integers(start, length))))
    part = reader().read("experts", [a for a, _ in bounds], [b - a for a, b in bounds])
    expected = whole()[tuple(slice(a, b) for a, b in bounds)]
    assert part.shape == expected.shape
    assert torch.equal(part, expected)


def test_other_names_are_read_as_they_are() -> None:
    expected = InitialWeights(TENSORS, seed=1).read("expert.1.up", (0, 0), (3, 4))
    assert torch.equal(reader().read("renamed", (0, 0), (3, 4)), expected)
    assert torch.equal(reader().read("expert.1.up", (0, 0), (3, 4)), expected)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_pack_is_published_as_its_tensors(gathers: bool) -> None:
    found = dict(unpacked("experts", whole() if gathers else torch.empty(0), STACK, TENSORS))
    assert found.keys() == TENSORS.keys()
    if gathers:
        assert all(
            torch.equal(it, InitialWeights(TENSORS, 1).read(name, (0, 0), it.shape)) for name, it in found.items()
        )
    else:
        assert all(it.numel() == 0 for it in found.values())
