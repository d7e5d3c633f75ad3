"""Degrees of parallelism: what fits, and the issues of what does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm_llm.errors import SpecError
from sm_llm.spec.derive import derive_task
from sm_llm.spec.loading.load import load
from sm_llm.spec.parallelism.base import Layout, TrainingFacts
from sm_llm.spec.parallelism.fsdp import FsdpSpec
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.spec.tasks import TrainTask

DATA = {"format": "synthetic", "seq_length": 64, "rows": 96}


def spec(**fields: Any) -> FsdpSpec:
    return FsdpSpec.model_validate(fields, strict=False)


def refused(world_size: int, node_size: int | None = None, **fields: Any) -> str:
    with pytest.raises(SpecError) as caught:
        spec(**fields).layout(world_size, node_size)
    return str(caught.value)


def training_issues(seq_length: int, **fields: Any) -> list[str]:
    facts = TrainingFacts(1, seq_length, compiles=False, compute="bf16", samples=False)
    return list(map(str, spec(**fields).training_issues(facts)))


@pytest.mark.parametrize(
    ("fields", "node_size", "expected"),
    [
        ({}, None, Layout(1, 16, 1, 1)),
        ({"sharding": "none"}, None, Layout(16, 1, 1, 1)),
        ({"sharding": "hybrid"}, 8, Layout(2, 8, 1, 1)),
        ({"sharding": "hybrid", "tensor_parallel_degree": 2}, 8, Layout(2, 4, 1, 2)),
        ({"sharding": "hybrid", "hybrid_shard_degree": 2}, 8, Layout(8, 2, 1, 1)),
        ({"tensor_parallel_degree": 2, "context_parallel_degree": 4}, 8, Layout(1, 8, 4, 2)),
        ({"sharding": "none", "context_parallel_degree": 16}, 8, Layout(16, 1, 16, 1)),
    ],
)
def test_sixteen_processes(fields: dict[str, Any], node_size: int | None, expected: Layout) -> None:
    assert spec(**fields).layout(16, node_size) == expected


def test_data_and_loss_parts() -> None:
    found = Layout(replicate=2, shard=8, context=4, tensor=2)
    assert (found.world_size, found.data, found.loss_parts) == (32, 4, 16)
    assert [found.data_rank(rank) for rank in (0, 7, 8, 31)] == [0, 0, 1, 3]


def test_stages_of_a_pipeline_see_the_same_rows_and_only_the_last_has_a_loss() -> None:
    found = NxdSpec(tensor_parallel_degree=2, pipeline_parallel_degree=4).layout(16)
    assert found == Layout(replicate=2, tensor=2, pipeline=4)
    assert (found.world_size, found.data, found.loss_parts) == (16, 2, 2)
    assert [found.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1] * 4
    assert found.degrees()["pipeline_parallel_degree"] == 4
    assert "pipeline_parallel_degree" not in Layout(shard=2).degrees()


@given(st.data())
def test_every_layout_multiplies_out(data: st.DataObject) -> None:
    """Whatever is not refused uses every process once, in both views."""
    world = data.draw(st.integers(1, 64))
    degrees = {
        "tensor_parallel_degree": data.draw(st.integers(1, 8)),
        "context_parallel_degree": data.draw(st.integers(1, 8)),
        "sharding": data.draw(st.sampled_from(["full", "none"])),
    }
    try:
        found = spec(**degrees).layout(world)
    except SpecError:
        assert world % (degrees["tensor_parallel_degree"] * degrees["context_parallel_degree"])
        return
    assert found.replicate * found.shard * found.tensor == world == found.data * found.context * found.tensor
    parts = [found.data_rank(rank) for rank in range(world)]
    assert sorted(set(parts)) == list(range(found.data))
    assert len(parts) == found.data * parts.count(0)


def test_DL08_degrees_that_do_not_fit_the_processes_show_the_arithmetic() -> None:
    reported = refused(8, tensor_parallel_degree=3)
    assert "8 processes are not divisible by tensor_parallel_degree x context_parallel_degree = 3 x 1 = 3" in reported
    assert "8 / 3 leaves 2" in reported
    assert "1, 2, 4, 8 divides them" in reported
    reported = refused(8, tensor_parallel_degree=2, context_parallel_degree=8)
    assert "context_parallel_degree" in reported
    assert "2 x 8 = 16" in reported
    assert "1, 2, 4 divides them" in reported


def test_shard_degrees_that_do_not_fit() -> None:
    reported = refused(12, tensor_parallel_degree=2, sharding="hybrid", hybrid_shard_degree=4)
    assert "12 processes / tensor_parallel_degree 2 = 6, which is not a multiple of 4" in reported
    assert "1, 2, 3, 6 works" in reported
    assert "a node has 3 processes" in refused(6, 3, tensor_parallel_degree=2, sharding="hybrid")
    assert "hybrid_shard_degree" in refused(4, sharding="hybrid", hybrid_shard_degree=0)


def test_parameters_can_stay_gathered_over_fewer_processes_only() -> None:
    assert spec(reshard_after_forward=2).layout(8).shard == 8
    assert "2, 4 works, or true or false" in refused(8, reshard_after_forward=3)
    assert "Use true or false" in refused(2, reshard_after_forward=2)


def test_options_that_do_not_go_together() -> None:
    assert training_issues(64) == []
    assert "sharding: hybrid" in training_issues(64, hybrid_shard_degree=2)[0]
    kept = training_issues(64, offload_activations=True, activation_checkpointing="none")
    assert "use activation_checkpointing full or every_nth" in kept[0]
    assert training_issues(64, offload_activations=True, activation_checkpointing="every_nth") == []
    assert "every_nth" in training_issues(64, checkpoint_every_layers=4)[0]
    assert training_issues(64, checkpoint_every_layers=4, activation_checkpointing="every_nth") == []


@pytest.mark.parametrize(
    ("fields", "unit"),
    [
        ({}, 1),
        ({"context_parallel_degree": 4}, 8),
        ({"tensor_parallel_degree": 4}, 4),
        ({"tensor_parallel_degree": 4, "sequence_parallel": False}, 1),
        ({"tensor_parallel_degree": 3, "context_parallel_degree": 2}, 12),
        ({"tensor_parallel_degree": 4, "context_parallel_degree": 2}, 8),
    ],
)
def test_sequences_can_be_cut(fields: dict[str, Any], unit: int) -> None:
    assert [length for length in range(1, 25) if not training_issues(length, **fields)] == list(range(unit, 25, unit))


def test_a_sequence_that_cannot_be_cut_is_reported_with_its_neighbours() -> None:
    (issue,) = training_issues(30, context_parallel_degree=4)
    assert "30 / 8 leaves 6" in issue
    assert "24 or 32 works" in issue


def test_the_batch_is_divided_by_the_data_parallel_degree() -> None:
    degrees = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}
    fields = {"data": DATA, "max_steps": 1, "micro_batch_size": 2, "global_batch_size": 16, "parallelism": degrees}
    derived = derive_task(TrainTask.model_validate(fields, strict=False), 16)
    assert (derived.data_parallel_degree, derived.accumulation_steps, derived.world_size) == (4, 2, 16)
    with pytest.raises(SpecError, match=r"micro_batch_size x data_parallel_degree = 2 x 4 = 8"):
        derive_task(TrainTask.model_validate({**fields, "global_batch_size": 12}, strict=False), 16)


def test_all_faults_of_the_degrees_come_at_once() -> None:
    degrees = {"tensor_parallel_degree": 3, "context_parallel_degree": 2, "offload_activations": True}
    degrees |= {"activation_checkpointing": "none"}
    task = {"kind": "train", "model": {"preset": "tiny"}, "data": DATA, "max_steps": 1, "parallelism": degrees}
    with pytest.raises(SpecError) as caught:
        load({"name": "job", "task": task, "compute": {"processes_per_instance": 8}}, environ={})
    assert {fault.path.rpartition(".")[2] for fault in caught.value.issues} == {
        "offload_activations",
        "seq_length",
        "tensor_parallel_degree",
    }
