"""The layout rules: every degree that works, every one that does not with its arithmetic, and the inverse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm_llm.convert.layout import (
    Heads,
    NxdDegrees,
    fitting_degrees,
    kv_range,
    padded_vocabulary,
    query_range,
    resolve,
    stage_layers,
)
from sm_llm.convert.mapping_rules import HEAD, ShardPlan, gaps, parts_by_source, primary_and_copies
from sm_llm.errors import ConversionRefused
from sm_llm.models.config import normalise
from tests.convert.models import CONFIGS, tensors
from tests.fixtures.sampling import number


def config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return normalise({**CONFIGS[family], **changes})


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "stages"),
    [
        (5, 3, 1, [[0], [1, 2], [3, 4]]),
        (4, 2, 1, [[0, 1], [2, 3]]),
        (7, 2, 2, [[0, 3, 4], [1, 2, 5, 6]]),
        (3, 3, 1, [[0], [1], [2]]),
    ],
)
def test_layers_of_the_stages(layers: int, pipeline: int, virtual: int, stages: list[list[int]]) -> None:
    assert stage_layers(layers, NxdDegrees(1, pipeline, virtual)) == stages


def test_heads_where_key_value_heads_are_copied() -> None:
    """Q 8, K 2, T 4: on trn1 rank r holds head r mod 2, on trn2 head r div 2; the queries are those of that head."""
    heads = Heads(8, 2, 16)
    one, two = NxdDegrees(4, kv_multiplier=2), NxdDegrees(4, kv_multiplier=2, layout="trn2")
    assert [kv_range(heads, one, rank)[0] for rank in range(4)] == [0, 1, 0, 1]
    assert [query_range(heads, one, rank) for rank in range(4)] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    assert [kv_range(heads, two, rank)[0] for rank in range(4)] == [0, 0, 1, 1]
    assert [query_range(heads, two, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


@given(
    kv=st.integers(1, 8),
    group=st.integers(1, 8),
    tensor=st.integers(1, 64),
    layout=st.sampled_from(["trn1", "trn2"]),
)
@settings(max_examples=number(60, whole=600))
def test_each_query_head_is_beside_its_key_value_head(kv: int, group: int, tensor: int, layout: Any) -> None:
    """On every rank, for whatever degrees are accepted: all query heads exactly once, each with its own head."""
    sizes = {"num_attention_heads": kv * group, "num_key_value_heads": kv, "intermediate_size": tensor, "head_dim": 8}
    whole = config(**sizes)
    if tensor not in fitting_degrees(whole):
        with pytest.raises(ConversionRefused):
            resolve(whole, tensor=tensor)
        return
    heads, degrees = Heads(kv * group, kv, 8), resolve(whole, tensor=tensor, layout=layout)
    seen = []
    for rank in range(tensor):
        first, last = query_range(heads, degrees, rank)
        low, high = kv_range(heads, degrees, rank)
        local = (last - first) // (high - low)
        assert [low + location // local for location in range(last - first)] == [
            it // group for it in range(first, last)
        ]
        seen += range(first, last)
    assert sorted(seen) == list(range(kv * group))


@pytest.mark.parametrize("family", CONFIGS)
@given(data=st.data())
@settings(max_examples=number(10, whole=100))
def test_joining_the_slices_gives_the_source(family: str, data: st.DataObject) -> None:
    """Cut every tensor by the plan and join it by its inverse; copies are equal and nothing is left out."""
    changes: dict[str, Any] = {
        "num_hidden_layers": data.draw(st.integers(1, 5)),
        "vocab_size": data.draw(st.integers(5, 40)),
    }
    whole = config(family, **changes)
    tensor = data.draw(st.sampled_from(fitting_degrees(whole)))
    pipeline = data.draw(st.integers(1, changes["num_hidden_layers"]))
    qkv = data.draw(st.sampled_from(["linear", "fused"] if tensor > 2 else ["linear", "fused", "split"]))
    layout = data.draw(st.sampled_from(["trn1", "trn2"]))
    plan = ShardPlan(whole, resolve(whole, tensor=tensor, pipeline=pipeline, qkv=qkv, layout=layout))
    sources = tensors(whole)
    stages = [plan.stage(it) for it in range(pipeline)]
    assert sorted(name for stage in stages for name in stage) == sorted(plan.everything())
    shards = {}
    for rank in range(tensor):
        for it in plan.rank(rank, plan.everything()):
            rest = it.shape[1:]
            pieces = [
                (sources[p.source][p.begin : p.end] if it.axis == 0 else sources[p.source][:, p.begin : p.end])
                if p.source
                else np.zeros((p.length, *rest), np.float32)
                for p in it.pieces
            ]
            shards[rank, it.name] = np.concatenate(pieces, it.axis)
            assert shards[rank, it.name].shape == it.shape
    parts = parts_by_source({rank: plan.rank(rank, plan.everything()) for rank in range(tensor)})
    assert parts.keys() == sources.keys()
    for name, source in sources.items():
        primary, copies = primary_and_copies(parts[name])
        axis = primary[0].tensor.axis

        def held(part: Any, axis: int = axis) -> np.ndarray:
            array = shards[part.rank, part.tensor.name]
            location = slice(part.at, part.at + part.end - part.begin)
            return array[location] if axis == 0 else array[:, location]

        assert not list(gaps(primary, source.shape[axis]))
        assert np.array_equal(np.concatenate([held(it) for it in primary], axis), source)
        assert all(np.array_equal(held(first), held(other)) for first, other in copies)


REFUSED = [
    ({"tensor": 3}, r"num_attention_heads 8 / 3 leaves 2; 2 key/value heads: 3 neither divides"),
    ({"tensor": 3}, r"Use one of 1, 2, 4, 8"),
    ({"tensor": 16}, r"num_attention_heads 8 / 16 leaves 8"),
    ({"tensor": 4, "kv_multiplier": 4}, r"2 key/value heads x 4 must be the tensor-parallel degree of 4.*Use 2"),
    ({"tensor": 2, "kv_multiplier": 2}, r"degree of 2 divides the 2 key/value heads.*Use 1"),
    ({"tensor": 4, "qkv": "split"}, r"2 heads x 2 = 4 ranks need copies.*Use linear or fused"),
    ({"tensor": 2, "qkv": "coalesced"}, r"the model has 8 and 2"),
    ({"tensor": 2, "qkv": "joined"}, r"must be one of split, linear, fused, coalesced"),
    ({"tensor": 2, "layout": "trn3"}, r"must be one of trn1, trn2"),
    ({"tensor": 2, "pipeline": 2, "virtual": 2}, r"2 stages x 2 virtual = 4 parts of 2 layers.*Use at most 1"),
    ({"tensor": 2, "virtual": 3}, r"1 stage x 3 virtual = 3 parts of 2 layers"),
    ({"tensor": 0}, r"must be a whole number from 1"),
]


@pytest.mark.parametrize(("degrees", "message"), REFUSED)
def test_NX04_degrees_that_do_not_fit_are_refused_with_their_arithmetic(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionRefused, match=message):
        resolve(config(), **degrees)


def test_every_fault_at_once() -> None:
    with pytest.raises(ConversionRefused) as found:
        resolve(config(), tensor=3, pipeline=3, qkv="coalesced")
    assert len(found.value.issues) == 3


def test_SF05_CV10_the_vocabulary_is_padded() -> None:
    assert padded_vocabulary(151_669, 4) == 151_672
    plan = ShardPlan(config(), resolve(config(), tensor=4))
    assert plan.padded_vocabulary == 104
    assert [plan.rank(3, [HEAD])[0].pieces[-1].source, plan.rank(3, [HEAD])[0].shape[0]] == ["", 26]
