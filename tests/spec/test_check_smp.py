"""Rules of SMP v2 that show in a specification alone, each by a case."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.models.config import model_config
from sm_llm.models.parallel import smp_issues
from sm_llm.spec.loading.load import load
from sm_llm.spec.parallelism.base import Layout
from sm_llm.spec.parallelism.smp import SmpSpec

JOB: dict[str, Any] = {
    "name": "job",
    "task": {
        "kind": "train",
        "model": {"preset": "llama-2-7b"},
        "data": {"format": "synthetic", "seq_length": 4096, "rows": 1000},
        "max_steps": 10,
    },
    "compute": {"processes_per_instance": 8, "instance_count": 2},
}


def reported(seq_length: int = 4096, compile: bool = False, **smp: Any) -> str:
    data = {**JOB["task"]["data"], "seq_length": seq_length}
    task = {**JOB["task"], "parallelism": {"strategy": "smp", **smp}, "data": data, "precision": {"compile": compile}}
    try:
        load({**JOB, "task": task}, environ={})
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hybrid_shard_degree": 17}, "world size / tensor_parallel_degree = 16 / 1 = 16"),
        ({"hybrid_shard_degree": 3}, "does not divide the world size of 16"),
        ({"tensor_parallel_degree": 16}, "tensor parallelism would cross nodes"),
        ({"hybrid_shard_degree": 2, "context_parallel_degree": 4}, "more than hybrid_shard_degree = 2"),
        ({"tensor_parallel_degree": 2, "expert_parallel_degree": 2}, "not possible together with tensor parallelism"),
        ({"sm_activation_offloading": True, "activation_checkpointing": "none"}, "offloads checkpointed activations"),
        ({"collectives": "smddp", "tensor_parallel_degree": 2, "hybrid_shard_degree": 1}, "smddp does not work with"),
        ({"activation_loading_horizon": 0}, "activation_loading_horizon"),
        ({"seq_length": 4100, "context_parallel_degree": 8, "hybrid_shard_degree": 8}, "2 x context_parallel_degree"),
        ({"hybrid_shard_degree": 16, "expert_parallel_degree": 8}, "128 does not divide the world size of 16"),
        ({"hybrid_shard_degree": 4, "expert_parallel_degree": 8}, "Use one of 1, 2"),
        ({"fp8": True, "seq_length": 4088}, "a multiple of 16 tokens a GPU, and this makes 4088"),
        (
            {"fp8": True, "seq_length": 48, "context_parallel_degree": 2, "hybrid_shard_degree": 2},
            "this makes 24 (got 48). Use a multiple of 32",
        ),
        ({"compile": True}, "not go through torch.compile"),
        ({"shard_degree": 8}, "hybrid_shard_degree"),
    ],
)
def test_what_smp_cannot_do_is_reported_with_the_arithmetic(changes: dict[str, Any], expected: str) -> None:
    assert expected in reported(**changes)


def test_one_degree_that_does_not_divide_is_one_fault() -> None:
    assert reported(tensor_parallel_degree=3, hybrid_shard_degree=8).count("task.parallelism") == 1


@pytest.mark.parametrize("degree", [0, 1, 2, 16])
def test_what_fits_is_fine(degree: int) -> None:
    assert reported(hybrid_shard_degree=degree) == ""


@pytest.mark.parametrize(
    ("smp", "expected"),
    [
        (SmpSpec(), Layout(1, 16, 1, 1)),
        (SmpSpec(hybrid_shard_degree=1), Layout(16, 1, 1, 1)),
        (SmpSpec(tensor_parallel_degree=2), Layout(1, 8, 1, 2)),
        (SmpSpec(hybrid_shard_degree=4, context_parallel_degree=2, tensor_parallel_degree=2), Layout(2, 4, 2, 2)),
        (SmpSpec(hybrid_shard_degree=2, expert_parallel_degree=8), Layout(8, 2, 1, 1, 8)),
        (SmpSpec(expert_parallel_degree=8), Layout(8, 2, 1, 1, 8)),
    ],
)
def test_the_loader_sees_world_size_by_tensor_times_context(smp: SmpSpec, expected: Layout) -> None:
    found = smp.layout(16)
    assert found == expected
    assert found.world_size == 16
    assert found.data == 16 // (smp.tensor_parallel_degree * smp.context_parallel_degree)


def model(name: str, **overrides: Any) -> dict[str, Any]:
    return model_config(preset=name, path=None, pretrained=None, overrides=overrides)


@pytest.mark.parametrize(
    ("preset", "degrees", "expected"),
    [
        ("llama-2-70b", {"tensor": 16}, "num_key_value_heads 8 / 16"),
        ("llama-2-7b", {"expert": 8}, "SMP v2 has none for llama models"),
        ("llama-2-13b", {"tensor": 5}, "intermediate_size 13824 / 5"),
        ("mixtral-8x7b", {"expert": 16}, "experts: 8 / 16 leaves 8"),
        ("qwen3-8b", {}, "transformers 4.44 knows no qwen3 models, and SMP's image has no other"),
    ],
)
def test_what_a_model_does_not_allow_is_reported(preset: str, degrees: dict[str, int], expected: str) -> None:
    wanted = {"tensor": 1, "context": 1, "expert": 1, "fp8": False, **degrees}
    assert expected in " ".join(str(fault) for fault in smp_issues(model(preset), **wanted))  # type: ignore[arg-type]


def test_all_nine_keys_and_the_tasks_seed() -> None:
    assert SmpSpec().library_parameters(5)["random_seed"] == 5
    assert SmpSpec(random_seed=7).library_parameters(5)["random_seed"] == 7
    assert len(SmpSpec().library_parameters(0)) == 9
