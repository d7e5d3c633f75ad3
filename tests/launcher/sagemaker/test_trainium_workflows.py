"""The workflows for Trainium as pipelines: golden definitions, and what their steps must have in common."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sm_llm.launcher.backends.sagemaker.pipelines.pipeline_operations import definition
from sm_llm.launcher.planner import plan
from tests.launcher.sagemaker.conftest import ROLE

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


@pytest.mark.parametrize(("name", "nodes"), zip(RECIPES, (1, 16), strict=True), ids=RECIPES)
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
    arrangement = train.job.task.parallelism.arrangement(8)  # type: ignore[union-attr]
    assert (
        arrangement
        == "tensor 32 x pipeline 8 = 256 shard files of a converted model; 8 key/value heads x 4 copies = 32"
    )
    converts = found["convert"].settings["converts"]
    assert converts.endswith(
        "-> neuronx-distributed: tensor 32 x pipeline 8 = 256 shard files, each tensor in a file beside them; "
        "qkv fused, layout trn1"
    )
