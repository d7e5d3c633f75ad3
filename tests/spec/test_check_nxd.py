"""Arithmetic of the strategy nxd: which degrees, lengths and formats fit, and what a plan shows of them."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.launcher.backends.sagemaker.request.distribution import distribution
from sm_llm.launcher.planner import plan
from sm_llm.models.config import model_config
from sm_llm.models.parallel import kv_copies, nxd_issues
from sm_llm.spec.loading.load import load
from sm_llm.spec.parallelism.base import TrainingFacts
from sm_llm.spec.parallelism.nxd import NxdSpec

ACCOUNT = ("backend.role=arn:aws:iam::123456789012:role/SageMaker", "storage=s3://bucket/runs")
PRESETS = {
    "llama-2-7b": (8, 1, 1, 4096),
    "llama-2-13b": (8, 4, 1, 4096),
    "llama-3-8b": (32, 1, 1, 8192),
    "llama-2-70b": (32, 8, 8, 4096),
    "llama-3-70b": (32, 8, 8, 8192),
}
"""Model -> tensor and pipeline degree, instances and sequence length of AWS's own scripts on trn1.32xlarge."""


def facts(**changes: Any) -> TrainingFacts:
    given = {
        "micro_batch_size": 1,
        "seq_length": 4096,
        "compiles": False,
        "compute": "fp32",
        "samples": False,
        **changes,
    }
    return TrainingFacts(**given)


def problems(spec: NxdSpec, **changes: Any) -> str:
    return "\n".join(map(str, spec.training_issues(facts(**changes))))


def trainium(*changes: str) -> tuple[str, ...]:
    return ("llama-3-8b-nxd", *ACCOUNT, *changes)


@pytest.mark.parametrize("name", PRESETS)
def test_the_degrees_of_awss_scripts_are_planned_and_fit_into_a_core(name: str) -> None:
    tensor, pipeline, instances, length = PRESETS[name]
    (found,) = plan(
        *trainium(
            f"task.model.preset={name}",
            f"task.parallelism.tensor_parallel_degree={tensor}",
            f"task.parallelism.pipeline_parallel_degree={pipeline}",
            f"compute.instance_count={instances}",
            f"task.data.seq_length={length}",
            "backend.max_run_seconds=86400",
        )
    )
    assert found.unsupported == ()
    assert found.derived is not None
    assert found.derived.data_parallel_degree == 32 * instances // (tensor * pipeline)
    assert found.memory is not None
    assert 2 * 2**30 < found.memory.total < 16 * 2**30
    assert not [it for it in found.warnings if "memory" in it]


def test_the_plan_shows_the_copies_of_heads_the_shard_files_and_the_memory_of_a_core() -> None:
    from sm_llm.launcher.display.tables import _plan_rows

    (found,) = plan(*trainium("task.parallelism.pipeline_parallel_degree=4"))
    shown = dict(_plan_rows(found))
    assert shown["degrees"] == (
        "tensor 32 x pipeline 4 = 128 shard files of a converted model; 8 key/value heads x 4 copies = 32"
    )
    assert "of 16 GiB" in shown["memory of a NeuronCore"]
    assert any("neuronx-distributed is in maintenance" in it for it in found.warnings)


def test_a_model_that_needs_more_than_a_core_has_is_warned_of() -> None:
    (found,) = plan(
        *trainium(
            "task.model.preset=llama-2-70b", "task.parallelism.tensor_parallel_degree=8", "task.data.seq_length=4096"
        )
    )
    (warning,) = [it for it in found.warnings if "out of memory" in it]
    assert "the runtime 1.5" in warning
    assert "raise the tensor- or pipeline-parallel degree" in warning


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize(("heads", "kv"), [(32, 8), (32, 4), (64, 8), (32, 32)])
def test_NX04_key_value_heads_are_copied_as_often_as_the_degree_asks_for(heads: int, kv: int, tensor: int) -> None:
    config = model_config(
        preset="llama-3-8b",
        path=None,
        pretrained=None,
        overrides={"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 128 * heads},
    )
    copies = kv_copies(kv, tensor)
    assert kv * copies == tensor or (copies == 1 and kv % tensor == 0)
    assert nxd_issues(config, tensor=tensor, pipeline=1, virtual=1, multiplier=copies) == []
    (issue,) = nxd_issues(config, tensor=tensor, pipeline=1, virtual=1, multiplier=copies + 1)
    assert issue.path == "task.parallelism.kv_size_multiplier"
    assert f"Use {copies}, or leave it out" in str(issue)


def test_NX04_a_degree_that_neither_divides_the_heads_nor_is_a_multiple_is_refused_with_those_that_are() -> None:
    config = model_config(preset="llama-3-8b", path=None, pretrained=None, overrides={})
    found = "\n".join(map(str, nxd_issues(config, tensor=12, pipeline=1, virtual=1, multiplier=None)))
    assert "num_attention_heads 32 / 12 leaves 8" in found
    assert "neither divides the model's 8 key/value heads nor is a multiple of them" in found


@pytest.mark.parametrize(
    ("overrides", "pipeline", "path"),
    [
        ({"attention_bias": True}, 1, "attention_bias"),
        ({"mlp_bias": True}, 1, "mlp_bias"),
        ({"attention_dropout": 0.1}, 1, "attention_dropout"),
        ({"hidden_act": "gelu"}, 1, "hidden_act"),
        ({"tie_word_embeddings": True}, 2, "tie_word_embeddings"),
    ],
)
def test_SF03_parts_that_the_layers_do_not_have_are_refused(
    overrides: dict[str, Any], pipeline: int, path: str
) -> None:
    config = model_config(preset="llama-3-8b", path=None, pretrained=None, overrides=overrides)
    found = nxd_issues(config, tensor=8, pipeline=pipeline, virtual=1, multiplier=None)
    assert [it.path for it in found] == [f"task.model.config.{path}"]


@pytest.mark.parametrize(
    ("options", "training", "expected"),
    [
        ({}, {"micro_batch_size": 2}, "micro-batches of one sequence only"),
        ({}, {"seq_length": 1024}, "multiples of 2048 tokens (got 1024). Use 2048, or"),
        ({"flash_attention": False}, {"seq_length": 1001}, "1001 / 8 leaves 1"),
        ({"pipeline_parallel_degree": 2}, {"samples": True}, "no text can be written"),
        ({}, {"compiles": True}, "does not go through torch.compile"),
        ({}, {"compute": "bf16", "master": "bf16"}, "ZeRO-1 keeps the parameters in fp32"),
        ({"zero1": False}, {"compute": "bf16"}, "no fp32 copy"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(options: dict[str, Any], training: dict[str, Any], expected: str) -> None:
    assert expected in problems(NxdSpec(**options), **training)
    assert problems(NxdSpec()) == ""


def test_degrees_that_do_not_fit_the_nodes_are_refused() -> None:
    with pytest.raises(
        SpecError, match=r"whose 32 processes it does not divide: 32 / 64 leaves 32 .*Use one of 1, 2, 4, 8, 16, 32"
    ):
        NxdSpec(tensor_parallel_degree=64).layout(64, 32)
    with pytest.raises(SpecError, match="interleaved schedule"):
        NxdSpec(virtual_pipeline_degree=2).layout(32, 32)
    with pytest.raises(SpecError, match=r"share a micro-batch, which does not divide the world size: 32 / 64"):
        NxdSpec(tensor_parallel_degree=8, pipeline_parallel_degree=8).layout(32, 32)


def test_NX02_training_and_precompiling_have_one_environment_and_one_cache() -> None:
    training = load("llama-3-8b-nxd", [*ACCOUNT], environ={}).spec
    task = {"kind": "precompile", "training": training.model_dump(exclude_unset=True)["task"]}
    ahead = load({**training.model_dump(exclude_unset=True), "task": task}, [], environ={}).spec
    first, second = distribution(training).environment, distribution(ahead).environment  # type: ignore[arg-type]
    # torchrun's own variables are for the training's processes.
    labels = {name for name in first if name.startswith(("PET_", "TORCHELASTIC_"))}
    assert {name: it for name, it in first.items() if name not in labels} == second
    assert first["NEURON_COMPILE_CACHE_URL"] == "s3://bucket/runs/neuron-compile-cache"
    assert NxdSpec(compile_cache="/fsx/cache").environment("s3://b")["NEURON_COMPILE_CACHE_URL"] == "/fsx/cache"
