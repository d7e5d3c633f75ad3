"""Initial weights: the same bits for any slicing, never the same values twice, and the promised distribution."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.models import init_weights
from sm_llm.models.config import normalise
from sm_llm.models.families.family import Tensor
from sm_llm.models.families.table import family
from sm_llm.models.init_weights import Float32Array, initial_slice
from sm_llm.models.presets import PRESETS
from tests.fixtures.sampling import number

SHAPES = [(200_000,), (700, 300), (1000, 1), (2, 70_000), (5, 30, 900), (3, 2, 100_000)]


def normal(*shape: int, std: float = 0.02, zero_row: int | None = None) -> Tensor:
    return Tensor(shape, "matrix", "normal", std, zero_row)


def draw(tensor: Tensor, name: str = "w", seed: int = 0, cut: tuple[slice, ...] | None = None) -> Float32Array:
    """The whole tensor, or the part that ``cut`` (with explicit bounds) names."""
    bounds = [(part.start, part.stop) for part in cut] if cut else [(0, length) for length in tensor.shape]
    offsets, sizes = [start for start, _ in bounds], [stop - start for start, stop in bounds]
    return initial_slice(seed, name, tensor.shape, tensor, offsets, sizes)


@st.composite
def cuts(data: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    shape = data(st.sampled_from(SHAPES))
    cut = []
    for length in shape:
        start = data(st.integers(0, length))
        cut.append(slice(start, data(st.integers(start, length))))
    return shape, tuple(cut)


_whole = {shape: draw(normal(*shape)) for shape in SHAPES}


@settings(max_examples=number(80, whole=800))
@given(cuts())
def test_any_slice_equals_the_slice_of_the_whole(case: tuple[tuple[int, ...], tuple[slice, ...]]) -> None:
    shape, cut = case
    part = draw(normal(*shape), cut=cut)
    expected = _whole[shape][cut]
    assert part.dtype == np.float32
    assert part.shape == expected.shape
    assert part.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 4, 3])
def test_fsdp_shards_join_to_the_whole_and_differ(ranks: int) -> None:
    """Rows over ranks as FSDP2 cuts them: ceil(rows / ranks) each, the last ones short or empty."""
    tensor, rows = normal(701, 300), math.ceil(701 / ranks)
    parts = [
        draw(tensor, cut=(slice(min(r * rows, 701), min((r + 1) * rows, 701)), slice(0, 300))) for r in range(ranks)
    ]
    assert np.concatenate(parts).tobytes() == draw(tensor).tobytes()
    assert all(a.tobytes() != b.tobytes() for a, b in itertools.combinations(parts, 2))


def test_no_two_rows_blocks_names_or_seeds_share_values() -> None:
    tensor = normal(2000, 512, std=1.0)
    draws = [draw(tensor), draw(tensor, name="v"), draw(tensor, seed=1)]
    rows = np.concatenate(draws)
    assert len({row.tobytes() for row in rows}) == len(rows)
    per_block = init_weights.BLOCK_ELEMENTS // 512
    blocks = [draws[0][start : start + per_block].ravel() for start in range(0, 1920, per_block)]
    pairs = itertools.combinations([*blocks, draws[1][:per_block].ravel(), draws[2][:per_block].ravel()], 2)
    for one, other in pairs:
        # Independent samples correlate within five standard errors.
        assert abs(float(np.corrcoef(one, other)[0, 1])) < 5 / math.sqrt(one.size)


def test_values_are_normal() -> None:
    values = np.sort(draw(normal(2000, 1000, std=0.02)).ravel().astype(np.float64)) / 0.02
    count = values.size
    assert abs(values.mean()) < 5 / math.sqrt(count)
    assert abs(values.std() - 1) < 5 / math.sqrt(2 * count)
    # Kolmogorov-Smirnov at 2,001 points; 1.95 / sqrt(n) is passed once in a thousand.
    points = np.linspace(-4, 4, 2001)
    expected = np.array([0.5 * (1 + math.erf(point / math.sqrt(2))) for point in points])
    empirical = np.searchsorted(values, points) / count
    assert np.abs(empirical - expected).max() < 1.95 / math.sqrt(count)
    assert 4.5 < values[-1] < 6.5
    assert np.unique(values).size > 0.8 * count


def test_ones_zeros_and_the_padding_row() -> None:
    assert draw(Tensor((7,), "norm", "ones")).tolist() == [1.0] * 7
    assert draw(Tensor((7,), "bias", "zeros"), cut=(slice(2, 5),)).tolist() == [0.0] * 3
    table = normal(300, 400, zero_row=170)
    whole, plain = draw(table), draw(normal(300, 400))
    assert not whole[170].any()
    assert np.delete(whole, 170, axis=0).tobytes() == np.delete(plain, 170, axis=0).tobytes()
    part = draw(table, cut=(slice(169, 172), slice(10, 20)))
    assert part.tobytes() == whole[169:172, 10:20].tobytes()


def test_golden_bits() -> None:
    """The function may not change with our code or with numpy: a resumed or repeated run would start elsewhere."""
    tensor = normal(130, 700)
    values = draw(tensor, name="model.layers.0.mlp.up_proj.weight", seed=42)
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == "0d5b92c3e98f5b6f"


def test_the_whole_tiny_model_has_no_two_equal_parameters() -> None:
    config = normalise(PRESETS["tiny"].config)
    tensors = {n: t for n, t in family(config).tensors(config).items() if t.init == "normal"}
    digests = {hashlib.sha256(draw(t, name=n)[:16].tobytes()).digest() for n, t in tensors.items()}
    assert len(digests) == len(tensors) == 6 * 7 + 1


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [((3, 5), (0, 0), (3, 4)), ((3, 4), (0,), (3,)), ((3, 4), (2, 0), (2, 4)), ((3, 4), (-1, 0), (1, 4))],
)
def test_slices_outside_the_tensor_are_our_own_mistake(shape: Any, offsets: Any, sizes: Any) -> None:
    with pytest.raises(ValueError, match="w: "):
        initial_slice(0, "w", shape, normal(3, 4), offsets, sizes)
