"""The estimate of a GPU's memory: against sums by hand, and against what others have published."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.contract.fp8_products import fp8_products
from sm_llm.contract.memory_estimate import GIB, MemoryEstimate, activation_bytes, memory_estimate
from sm_llm.launcher.planner import plan
from sm_llm.models.config import model_config
from sm_llm.spec.derive import derive_task
from sm_llm.spec.machines.hardware import Card, instance
from sm_llm.spec.parallelism.base import Layout, MemoryTerms
from sm_llm.spec.tasks import PrecisionSpec, TrainTask

ACCOUNT = ("backend.role=arn:aws:iam::123456789012:role/SageMaker", "storage=s3://bucket/runs")


def card(name: str) -> Card:
    found = instance(name)
    assert found is not None
    assert found.card is not None
    return found.card


def estimate(
    preset: str, gpus: int, seq_length: int = 4096, on: str = "ml.p5.48xlarge", config: Any = None, **fields: Any
) -> MemoryEstimate:
    data = {"format": "synthetic", "seq_length": seq_length, "rows": 1000}
    fields = {"precision": {"compute": "bf16"}, **fields}
    task = TrainTask.model_validate({"data": data, "max_steps": 1, **fields}, strict=False)
    full = model_config(preset=preset, path=None, pretrained=None, overrides=config or {})
    found = memory_estimate(full, task, derive_task(task, gpus), min(gpus, 8), card(on))
    assert found is not None
    return found


FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
BUDGET = {"activation_checkpointing": "budget"}
KEPT = {"reshard_after_forward": False}
COMPILED = {"compute": "bf16", "compile": True}
BF16_MOMENTS = {**COMPILED, "moments": "bf16"}
SPLIT = {"tensor_parallel_degree": 2}
FP8 = {"compute": "fp8", "compile": True}


def test_llama_2_7b_on_eight_gpus_by_hand() -> None:
    """6,738,415,616 parameters: 131,072,000 in table and head each, 202,383,360 in each of 32 layers.

    The peak is where the backward pass begins: no gradient is there but those on their way to the shards.
    """
    found = estimate("llama-2-7b", 8, parallelism=FULL, micro_batch_size=4)
    assert found.states == 6_738_415_616 * 12 / 8, "masters and two moments"
    head, layer = 131_072_000 + 4096, 202_383_360
    assert found.working == 2 * 2 * layer + (2 + 4) * (head + layer)
    # A layer that is computed again: 16 h for its norms, 8 h for attention, 8 f for the MLP, in bytes.
    one_layer = 16 * 4096 + 8 * 4096 + 8 * 11_008
    assert found.activations == 4 * 4096 * (32 * 2 * 4096 + one_layer)
    assert found.logits == 0
    at_the_end = 6_738_415_616 * 16 / 8
    assert found.total > at_the_end


@pytest.mark.parametrize(
    ("preset", "gpus", "seq_length", "micro_batch_size", "fields", "allocated_gib"),
    [
        ("llama-3.2-1b", 1, 4096, 4, {}, 42.9),
        ("llama-3.2-1b", 1, 4096, 4, {"precision": FP8}, 36.9),
        ("llama-3.2-1b", 1, 4096, 4, {"parallelism": BUDGET}, 36.9),
        ("llama-3.2-1b", 1, 4096, 4, {"parallelism": SELECTIVE}, 31.6),
        ("llama-3.2-1b", 1, 4096, 4, {"parallelism": FULL}, 25.3),
        ("qwen3-0.6b", 1, 8192, 4, {}, 50.5),
        ("mistral-7b", 1, 8192, 2, {"config": {"num_hidden_layers": 8}}, 45.1),
        ("mixtral-8x7b", 1, 4096, 2, {"config": {"num_hidden_layers": 2}}, 48.1),
        ("llama-3.1-8b", 2, 8192, 1, {}, 84.2),
        ("llama-3.1-8b", 2, 8192, 1, {"parallelism": KEPT}, 98.2),
        ("llama-3.1-8b", 2, 8192, 1, {"parallelism": SELECTIVE}, 63.7),
        ("llama-3.1-8b", 2, 8192, 2, {"parallelism": BUDGET}, 98.5),
        ("llama-3.1-8b", 2, 8192, 2, {"parallelism": {**KEPT, **BUDGET}}, 112.2),
        ("llama-3.1-8b", 2, 8192, 2, {"parallelism": KEPT, "precision": FP8}, 111.1),
        ("llama-3.1-8b", 2, 8192, 2, {"parallelism": {**KEPT, **BUDGET}, "precision": BF16_MOMENTS}, 97.3),
        ("llama-3.1-8b", 2, 8192, 1, {"parallelism": SPLIT, "global_batch_size": 2}, 81.1),
    ],
)
def test_it_is_what_trainings_have_allocated(
    preset: str, gpus: int, seq_length: int, micro_batch_size: int, fields: dict[str, Any], allocated_gib: float
) -> None:
    """Peaks of torch's allocator on H200s, compiled (docs/benchmarks.md); the 1B model has a head of its own."""
    options = {"precision": COMPILED, "micro_batch_size": micro_batch_size, **fields}
    if preset == "llama-3.2-1b":
        options["config"] = {"tie_word_embeddings": False}
    found = estimate(preset, gpus, seq_length, "ml.p5e.48xlarge", **options)
    assert -0.02 < found.total / GIB / allocated_gib - 1 < 0.04


def test_layers_that_keep_their_weights_in_fp8_are_counted() -> None:
    """Transposed weights of layers that are not computed again: a byte for each of their elements."""
    layer = 4096 * (4096 + 1024) * 2 + 3 * 4096 * 14_336

    def kept(**parallelism: Any) -> float:
        sizes = [
            estimate("llama-3.1-8b", 2, 8192, "ml.p5e.48xlarge", precision=it, parallelism=parallelism).working
            for it in (FP8, {**FP8, "compile": False})
        ]
        return (sizes[0] - sizes[1]) / layer

    assert kept() == kept(**BUDGET) == 32
    assert kept(activation_checkpointing="every_nth", checkpoint_every_layers=4) == 24
    assert kept(**FULL) == kept(offload_optimizer=True) == 0


@pytest.mark.parametrize(
    ("micro_batch_size", "parallelism", "precision", "by_card_gib"),
    [
        (1, KEPT, COMPILED, 121.1),
        (1, SELECTIVE, COMPILED, 85.5),
        (2, BUDGET, COMPILED, 118.9),
        (2, {**KEPT, **BUDGET}, COMPILED, 132.7),
        (2, KEPT, FP8, 130.7),
        (2, {**KEPT, **BUDGET}, BF16_MOMENTS, 117.0),
        (1, SPLIT, COMPILED, 86.2),
    ],
)
def test_it_is_what_the_card_has_shown(
    micro_batch_size: int, parallelism: dict[str, Any], precision: dict[str, Any], by_card_gib: float
) -> None:
    """Llama 3.1 8B on two H200s, 8,192 tokens a sequence, compiled (docs/benchmarks.md)."""
    options = {"micro_batch_size": micro_batch_size, "parallelism": parallelism, "precision": precision}
    options["global_batch_size"] = 2 * micro_batch_size
    found = estimate("llama-3.1-8b", 2, 8192, "ml.p5e.48xlarge", **options)
    assert -0.02 < found.by_card / GIB / by_card_gib - 1 < 0.03


@pytest.mark.parametrize(
    ("preset", "gpus", "smp", "micro_batch_size"),
    [
        ("llama-2-7b", 8, {"hybrid_shard_degree": 8}, 4),
        ("llama-2-70b", 256, {"hybrid_shard_degree": 256}, 2),
    ],
)
def test_what_aws_recommends_for_p4d_fits(preset: str, gpus: int, smp: dict[str, Any], micro_batch_size: int) -> None:
    """The reference configurations of SMP v2's best practices, and a few GiB more would not fit."""
    spec = {"strategy": "smp", "activation_checkpointing": "full", **smp}
    found = estimate(preset, gpus, parallelism=spec, micro_batch_size=micro_batch_size)
    assert list(found.warnings(card("ml.p4d.24xlarge"))) == []
    assert found.total > 0.6 * 40 * GIB


def test_one_process_keeps_rounded_copies_and_gathers_nothing() -> None:
    found = estimate("qwen2.5-0.5b", 1, 1024)
    assert found.working == 0
    assert found.states == 494_032_768 * (12 + 2), "no gradient is there yet"
    assert estimate("qwen2.5-0.5b", 1, 1024, precision={"compute": "fp32"}).states == 494_032_768 * 12
    summed = estimate("qwen2.5-0.5b", 1, 1024, global_batch_size=2)
    assert summed.states == 494_032_768 * (12 + 2 + 4), "those of the first micro-batch are"


def test_what_each_option_saves() -> None:
    plain = estimate("llama-2-7b", 8)
    assert estimate("llama-2-7b", 8, parallelism={"offload_optimizer": True}).states == 0
    halved = {"compute": "bf16", "master": "bf16"}
    assert estimate("llama-2-7b", 8, precision=halved).states == plain.states / 2
    rounded = estimate("llama-2-7b", 8, precision={"compute": "bf16", "moments": "bf16"})
    assert plain.states - rounded.states == 4 * 6_738_415_616 / 8
    reduced = estimate("llama-2-7b", 8, precision={"compute": "bf16", "reduce": "bf16"})
    assert plain.working - reduced.working == 2 * (131_076_096 + 202_383_360)
    gathered = estimate("llama-2-7b", 8, parallelism={"reshard_after_forward": False})
    assert gathered.working - plain.working == 2 * (6_738_415_616 - 2 * 202_383_360)
    wide = {"micro_batch_size": 8}
    plain = estimate("llama-2-7b", 8, **wide)
    nth = estimate("llama-2-7b", 8, parallelism={"activation_checkpointing": "every_nth"}, **wide)
    full, offloaded = (
        estimate("llama-2-7b", 8, parallelism={**FULL, **it}, **wide) for it in ({}, {"offload_activations": True})
    )
    assert plain.activations > nth.activations > full.activations > offloaded.activations
    split = estimate("llama-2-7b", 8, parallelism={"tensor_parallel_degree": 2}, **wide)
    assert split.working == plain.working / 2
    compiled, budget = (
        estimate("llama-2-7b", 8, precision=COMPILED, parallelism={"activation_checkpointing": kind}, **wide)
        for kind in ("none", "budget")
    )
    assert plain.activations > compiled.activations > budget.activations > full.activations
    chunks = estimate("llama-2-7b", 8, parallelism={"context_parallel_degree": 2}, **wide)
    assert chunks.activations == plain.activations / 2


@pytest.mark.parametrize(("on", "same"), [("ml.g4dn.12xlarge", "fp32"), ("ml.g5.12xlarge", "bf16")])
def test_a_format_that_is_left_open_counts_as_the_worker_settles_it(on: str, same: str) -> None:
    open_, given = (estimate("qwen2.5-0.5b", 4, on=on, precision={"compute": it}) for it in ("auto", same))
    assert open_ == given
    masters = {"compute": "auto", "master": "bf16"}
    given = estimate("qwen2.5-0.5b", 4, on=on, precision={**masters, "compute": "bf16"})
    assert estimate("qwen2.5-0.5b", 4, on=on, precision=masters) == given


def test_a_plan_shows_the_format_of_its_gpu() -> None:
    fields = ("compute.gpu=T4", "task.precision.compute=auto")
    assert plan("smoke", *fields)[0].settings["precision"].startswith("computes in fp32 (auto, on T4);")
    assert "bf16 where the hardware has it" in plan("smoke")[0].settings["precision"]


def test_only_what_is_gathered_in_fp8_counts_as_half() -> None:
    """Three processes share no matrix of Llama 3.1 8B evenly; experts and norms are never in fp8."""
    attention = 4096 * (4096 + 1024) * 2

    def working(preset: str, gpus: int, precision: dict[str, Any], **parallelism: Any) -> float:
        return estimate(preset, gpus, on="ml.p5e.48xlarge", precision=precision, parallelism=parallelism).working

    def transposed(preset: str, gpus: int) -> float:
        return working(preset, gpus, FP8) - working(preset, gpus, {**FP8, "compile": False})

    def halved(gpus: int, **parallelism: Any) -> float:
        plain, fp8 = (working("llama-3.1-8b", gpus, {"compute": it}, **KEPT, **parallelism) for it in ("bf16", "fp8"))
        return (plain - fp8) / (32 * layer)

    layer = attention + 3 * 4096 * 14_336
    assert transposed("llama-3.1-8b", 2) == 32 * layer
    assert transposed("llama-3.1-8b", 3) == 0
    assert 0.8 < halved(2) <= 1, "of two bytes, but for the layers at work"
    assert halved(3) == halved(2, offload_optimizer=True) == 0
    mixtral = fp8_products(model_config(preset="mixtral-8x7b", path=None, pretrained=None, overrides={}))
    assert [mixtral.gathered(shards) for shards in (2, 3)] == [attention, 0]


def test_key_heads_that_are_repeated_for_their_kernel_are_kept() -> None:
    """32 heads of queries and 8 of keys, 64 channels each, in 16 layers; multi-head attention repeats nothing."""
    config = model_config(preset="llama-3.2-1b", path=None, pretrained=None, overrides={})

    def kept(**precision: Any) -> float:
        formats = PrecisionSpec.model_validate({"compile": False, **precision})
        size = 2 if precision["compute"] == "bf16" else 4
        own = 4096 * activation_bytes(config, MemoryTerms(), Layout(), formats)[0]
        return (estimate("llama-3.2-1b", 1, precision=formats.model_dump()).activations - own) / 4096 / size / 16

    assert kept(compute="fp32") == 2 * (32 - 8) * 64
    assert kept(compute="bf16") == 0, "cuDNN's takes groups"
    whole = {"num_key_value_heads": 32}
    both = [estimate("llama-3.2-1b", 1, config=it, precision={"compute": "fp32"}).activations for it in (whole, {})]
    assert both[0] == both[1], "repeated heads are as many"


def test_what_products_in_bf16_take_is_kept() -> None:
    """Compiled layers compute again what norms and activations give to products in fp8 alone."""

    def saved(preset: str, **overrides: Any) -> float:
        config = model_config(preset=preset, path=None, pretrained=None, overrides=overrides)
        formats = [PrecisionSpec.model_validate(it) for it in (COMPILED, FP8)]
        kept, fp8 = (activation_bytes(config, MemoryTerms(), Layout(), it)[1] for it in formats)
        return (kept - fp8) / 2

    assert saved("llama-3.1-8b") == 2 * 4096 + 14_336
    assert saved("llama-3.1-8b", intermediate_size=14_328) == 4096, "those of the feed-forward block are in bf16"
    assert saved("mixtral-8x7b") == 4096, "those of experts as well"


def advised(*fields: str) -> str:
    [found] = plan("llama-2-7b-fsdp", *ACCOUNT, "compute.instance_type=ml.g5.48xlarge", *fields)
    [warning] = [it for it in found.issues if it.code == "memory-probably-short"]
    return warning.remedy


def test_what_is_done_already_is_not_advised() -> None:
    size, kind = "task.micro_batch_size=", "task.parallelism.activation_checkpointing="
    lower, full = "lower task.micro_batch_size", "set task.parallelism.activation_checkpointing to full"
    length = "task.data.seq_length=4096"
    assert advised(f"{size}2", f"{kind}none", length) == f"L{lower[1:]}, {full}, or shard over more GPUs"
    assert advised(f"{size}1", f"{kind}none", length) == f"S{full[1:]}, or shard over more GPUs"
    assert advised(f"{size}1", f"{kind}full", length, "compute.processes_per_instance=1") == "Shard over more GPUs"
    split = ("task.parallelism.tensor_parallel_degree=2", "task.precision.compile=true", f"{size}1")
    assert advised(*split, f"{kind}none", length).startswith(
        "Set task.parallelism.activation_checkpointing to selective"
    )


def test_copies_hold_sums_that_wait_for_the_last_micro_batch() -> None:
    hybrid = {"sharding": "hybrid", "hybrid_shard_degree": 8}
    once, twice = (estimate("llama-2-7b", 16, parallelism=hybrid, global_batch_size=it) for it in (16, 32))
    assert twice.states - once.states == 4 * 6_738_415_616 / 8


def test_experts_are_spread_over_their_own_degree() -> None:
    """1,605,636,096 parameters are in no expert, 45,097,156,608 in the experts of all layers."""
    spec = {"strategy": "smp", "hybrid_shard_degree": 8, "expert_parallel_degree": 8}
    found = estimate("mixtral-8x7b", 64, parallelism=spec)
    assert found.states == pytest.approx(16 / 8 * (1_605_636_096 + 45_097_156_608 / 8), rel=1e-3)


def test_a_plan_reports_it_and_warns_where_it_does_not_fit() -> None:
    [fits] = plan("llama-2-7b-fsdp", *ACCOUNT)
    assert fits.memory is not None
    assert fits.to_json()["memory"]["total"] == fits.memory.total
    assert [it for it in fits.warnings if "memory" in it] == []
    fixed = ("task.parallelism.activation_checkpointing=none", "task.micro_batch_size=2")
    [too_large] = plan("llama-2-7b-fsdp", *ACCOUNT, "compute.instance_type=ml.g5.48xlarge", *fixed)
    [warning] = [it for it in too_large.warnings if "memory" in it]
    assert "of 22.4 GiB: states " in warning
    assert "activation_checkpointing" in warning


def test_nothing_is_reported_where_no_gpu_is_known() -> None:
    assert plan("smoke")[0].memory is None
