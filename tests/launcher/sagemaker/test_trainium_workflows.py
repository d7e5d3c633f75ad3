"""The workflows for Trainium as pipelines: golden definitions, and what their steps must have in common."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from sm_llm.errors import PlanError
from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition
from sm_llm.launcher.display.tables import plan_table
from sm_llm.launcher.planner import plan
from tests.launcher.sagemaker.conftest import ROLE

if TYPE_CHECKING:
    from sm_llm.launcher.planning.plan import Plan

GOLDEN = Path(__file__).parents[2] / "golden" / "sagemaker"
GIVEN = (f"backend.role={ROLE}", "storage=s3://bucket/runs")
RECIPES = ("llama-2-7b-cpt-trn1", "llama-3-70b-cpt-trn1")
STEPS = ["model", "text", "prepare", "convert", "precompile", "train", "back"]


def as_golden(name: str) -> str:
    """The definition without the digests of code and requests, which follow every change of our own code."""
    text = json.dumps(definition(name, *GIVEN).to_json(), indent=2, sort_keys=True) + "\n"
    text = re.sub(r"bundles/[0-9a-f]{64}/", "bundles/<digest>/", text)
    return re.sub(rf"\b({'|'.join(STEPS)})-[0-9a-f]{{12}}\b", r"\1-<digest>", text)


def steps(name: str) -> dict[str, Any]:
    return {it["Name"]: it for it in json.loads(as_golden(name))["Steps"]}


@pytest.mark.parametrize("name", RECIPES)
def test_the_pipeline_is_the_golden_one(name: str) -> None:
    assert as_golden(name) == (GOLDEN / f"{name}.json").read_text()


@pytest.mark.parametrize(("name", "nodes"), list(zip(RECIPES, (1, 16), strict=True)), ids=RECIPES)
def test_NX02_precompile_and_train_have_one_cache_and_as_many_nodes(name: str, nodes: int) -> None:
    found = steps(name)
    assert list(found) == STEPS
    pair = [found[step]["Arguments"] for step in ("precompile", "train")]
    assert [it["ResourceConfig"]["InstanceCount"] for it in pair] == [nodes, nodes]
    first, second = (it["Environment"] for it in pair)
    neuron = {variable for variable in second if variable.startswith(("NEURON_", "XLA_", "MALLOC_", "FI_"))}
    assert {it: first.get(it) for it in neuron} == {it: second[it] for it in neuron}
    assert first["NEURON_COMPILE_CACHE_URL"] == "s3://bucket/runs/neuron-compile-cache"
    assert "precompile" in found["train"]["DependsOn"]


def test_the_70b_plan_shows_its_arithmetic() -> None:
    found = {it.step: it for it in plan("llama-3-70b-cpt-trn1", *GIVEN)}
    train = found["train"]
    assert train.derived is not None
    assert (train.world_size, train.derived.data_parallel_degree) == (512, 2)
    assert train.derived.accumulation_steps == 512
    rows = shown(train)
    assert "tensor 32 x pipeline 8 = 256 shard files of a converted model" in rows
    assert "8 key/value heads x 4 copies = 32" in rows
    assert re.search(r"memory of a NeuronCore +about 13\.\d of 16 GiB", rows)
    assert "500 steps, 4,194,304,000 tokens; an epoch has rows / 1,024 steps" in rows
    converts = found["convert"].settings["converts"]
    assert converts.endswith(
        "-> neuronx-distributed: tensor 32 x pipeline 8 = 256 shard files, each tensor in a file beside them; "
        "qkv fused, layout trn1"
    )


def test_the_7b_plan_shows_its_arithmetic() -> None:
    rows = shown(next(it for it in plan("llama-2-7b-cpt-trn1", *GIVEN) if it.step == "train"))
    assert "6,738,415,616 parameters" in rows
    assert "tensor 8 x pipeline 1 = 8 shard files" in rows
    assert re.search(r"memory of a NeuronCore +about \d+\.\d of 16 GiB", rows)


def test_degrees_that_the_fetched_model_does_not_allow_are_refused_by_the_plan() -> None:
    wide = "steps.train.task.parallelism.tensor_parallel_degree=16"
    with pytest.raises(PlanError, match=r"steps\.train.*kv_size_multiplier"):
        plan("llama-3-70b-cpt-trn1", *GIVEN, wide)


def test_a_model_that_is_not_built_in_has_no_numbers_before_it_is_fetched() -> None:
    other = plan("llama-2-7b-cpt-trn1", *GIVEN, "steps.model.task.source=hf://someone/another-model")
    assert next(it for it in other if it.step == "train").model is None


def shown(train: Plan) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(plan_table(train))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
