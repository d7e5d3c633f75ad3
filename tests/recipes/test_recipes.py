"""Every recipe that is shipped loads, is checked, and describes itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sm_llm.launcher.planner import plan
from sm_llm.spec.loading.load import load, recipe_files, recipe_summary
from tests.fixtures.expected_warnings import is_expected

if TYPE_CHECKING:
    from pathlib import Path

ACCOUNT = ("backend.role=arn:aws:iam::123456789012:role/SageMaker", "storage=s3://bucket/runs")


def needs_account(name: str) -> bool:
    return load(name, environ={}).spec.backend.name == "sagemaker"


@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_loads_under_its_own_name(name: str, tmp_path: Path) -> None:
    assert load(name, environ={"HOME": str(tmp_path)}).spec.name == name


@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_can_be_planned_without_a_warning(name: str) -> None:
    plans = plan(name, *(ACCOUNT if needs_account(name) else ()))
    assert [warning for step in plans for warning in step.warnings if not is_expected(warning)] == []


@pytest.mark.parametrize("name", recipe_files())
def test_a_recipe_states_what_it_does_in_one_sentence(name: str) -> None:
    summary = recipe_summary(recipe_files()[name])
    assert summary.endswith(".")
    assert 20 < len(summary) <= 118


def test_the_recipes_of_this_version() -> None:
    assert list(recipe_files()) == [
        "gpt-neox-20b-smp",
        "llama-2-70b-finetune-smp-slurm",
        "llama-2-70b-smp",
        "llama-2-7b-cpt-trn1",
        "llama-2-7b-fsdp-eks",
        "llama-2-7b-fsdp",
        "llama-3-1-8b-fsdp",
        "llama-3-70b-cpt-trn1",
        "llama-3-8b-nxd",
        "mistral-7b-fsdp",
        "mixtral-8x7b-smp",
        "smoke",
        "tiny-local",
    ]
