"""Every line of docs/recipes.md: planned without a warning, rendered for SageMaker, its model tried in shapes alone."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from sm_llm.contract.memory_estimate import GIB
from sm_llm.launcher import api
from sm_llm.launcher.planner import plan
from sm_llm.models.config import model_config
from sm_llm.models.families.table import family
from sm_llm.spec.machines.hardware import instance, instance_bf16_flops
from sm_llm.spec.parallelism.smp import SmpSpec
from sm_llm.spec.tasks import TrainTask
from tests.fixtures.expected_warnings import is_expected

if TYPE_CHECKING:
    from sm_llm.launcher.planning.plan import Plan

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
LINES = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
ACCOUNT = ("backend.role=arn:aws:iam::123456789012:role/SageMaker", "storage=s3://bucket/runs")
PROMISED = {
    "smp": {f"Llama 2 {size} {kind}" for size in ("7B", "13B", "70B") for kind in ("p4d", "p5")}
    | {"Mixtral 8x7B p5", "GPT-NeoX 20B p4d"},
    "fsdp": {f"Llama 2 {size} {kind}" for size in ("7B", "13B", "70B") for kind in ("p4d", "p5", "g5")}
    | {"Llama 3.1 8B p5", "Llama 3.1 70B p5", "Mistral 7B p4d"},
}


@cache
def planned(line: str) -> Plan:
    name, *overrides = line.split()
    [found] = plan(name, *ACCOUNT, *overrides)
    return found


def training(line: str) -> TrainTask:
    task = planned(line).job.task
    assert isinstance(task, TrainTask)
    return task


def test_every_promised_combination_has_a_line() -> None:
    for strategy, promised in PROMISED.items():
        found = {
            f"{model} {on.split()[-1]}" for model, on, line in LINES if training(line).parallelism.strategy == strategy
        }
        assert found == promised


@pytest.mark.parametrize(("model", "on", "line"), LINES, ids=[f"{model} on {on}" for model, on, _ in LINES])
def test_a_line_is_planned_for_what_it_states_without_a_warning(model: str, on: str, line: str) -> None:
    found = planned(line)
    assert [it for it in found.warnings if not is_expected(it)] == []
    nodes, kind = on.split(" x ")
    assert found.job.compute.instance_count == int(nodes)
    assert (found.job.compute.instance_type or "").startswith(f"ml.{kind}.")
    assert model.lower().replace(" ", "-") == training(line).model.preset
    assert found.job.name.startswith(model.lower().replace(" ", "-").replace(".", "-"))


@pytest.mark.parametrize("line", [line for _, _, line in LINES])
def test_a_line_is_rendered_as_a_request_that_fits_its_strategy(line: str) -> None:
    name, *overrides = line.split()
    [submission] = api.launch(name, *ACCOUNT, *overrides, dry_run=True)
    request = submission.to_json()
    text = json.dumps(request)
    if isinstance(smp := training(line).parallelism, SmpSpec):
        assert "smdistributed-modelparallel:2.5.1" in text
        given = find(request, "mp_parameters")
        assert json.loads(given) == smp.library_parameters(training(line).seed)
    else:
        assert "mp_parameters" not in text
        assert "pytorch-training:" in text


def find(value: Any, key: str) -> Any:
    """The first value under a key, however deep."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for it in value if (found := find(it, key)) is not None), None)
    return None


@pytest.mark.parametrize("line", [line for _, _, line in LINES])
def test_degrees_multiply_to_the_processes(line: str) -> None:
    found, task = planned(line), training(line)
    world, node = found.world_size, found.job.compute.processes
    arranged = task.parallelism.layout(world, node)
    assert arranged.world_size == world
    assert found.derived is not None
    assert arranged.data == found.derived.data_parallel_degree


@pytest.mark.parametrize("line", [line for _, _, line in LINES])
def test_no_more_than_two_hours_lie_between_two_checkpoints(line: str) -> None:
    """At 40% model FLOPs utilisation, which published runs of these models reach."""
    found, row = planned(line), instance(planned(line).job.compute.instance_type)
    assert found.derived is not None
    assert found.model is not None
    assert row is not None
    flops = found.model.flops_per_token * found.derived.tokens_per_step
    seconds = flops / (found.world_size * (instance_bf16_flops(row) or 0) * 0.4)
    assert seconds * (found.derived.checkpoint_every or 0) <= 2 * 3600


@pytest.mark.parametrize("line", [line for _, _, line in LINES])
def test_the_memory_of_a_gpu_is_used_and_suffices(line: str) -> None:
    found, row = planned(line), instance(planned(line).job.compute.instance_type)
    assert found.memory is not None
    assert row is not None
    assert list(found.memory.warnings(row.card)) == []
    assert found.memory.total > 0.35 * row.accelerator_gib * GIB


@pytest.mark.parametrize("line", [line for _, _, line in LINES])
def test_the_rate_is_that_of_the_published_training_of_the_size(line: str) -> None:
    """Llama 2's paper, table 1, and Llama 3's: 3e-4 for the small ones, 1.5e-4 for 70B."""
    preset, rate = training(line).model.preset or "", training(line).optim.learning_rate
    if preset.startswith("llama"):
        assert rate == (1.5e-4 if preset.endswith("70b") else 3e-4)
        assert training(line).optim.min_learning_rate == pytest.approx(rate / 10)


SHAPES = sorted({(training(line).model.preset or "", training(line).data.seq_length) for _, _, line in LINES})


@pytest.mark.parametrize(("preset", "seq_length"), SHAPES)
def test_a_model_runs_in_shapes_alone(preset: str, seq_length: int) -> None:
    """transformers' own classes on the meta device, two layers deep: the parameters are ours, and logits come out."""
    from sm_llm.worker.strategies.fsdp.attention import CausalAttention
    from sm_llm.worker.strategies.model import build_on_meta, named_parameters

    config = model_config(preset=preset, path=None, pretrained=None, overrides={"num_hidden_layers": 2})
    attention = CausalAttention(None, None, torch.device("meta"))
    attention.prepare(seq_length)
    model = build_on_meta(config, attention.register(), torch.bfloat16)
    found = {name: tuple(it.shape) for name, it in named_parameters(model).items()}
    assert found == {name: it.shape for name, it in family(config).parameters(config).items()}
    ids = torch.zeros((1, seq_length), dtype=torch.int64, device="meta")
    logits = model.eval()(input_ids=ids, use_cache=False).logits
    assert tuple(logits.shape) == (1, seq_length, family(config).vocab_size(config))
