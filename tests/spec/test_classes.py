"""Every field of a specification has a class, and specifications are compared by it."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from sm_llm.spec.base import SpecModel
from sm_llm.spec.comparison.leaves import leaves, spec_differences, unclassified
from sm_llm.spec.field_classes import FREE, WORK, FieldClass
from sm_llm.spec.job import JobSpec, WorkflowSpec
from sm_llm.spec.loading.load import changed


@pytest.mark.parametrize("kind", [JobSpec, WorkflowSpec], ids=lambda kind: kind.__name__)
def test_B4_every_field_declares_what_another_value_of_it_changes(kind: type[SpecModel]) -> None:
    missing = list(unclassified(kind))
    assert not missing, f"declare a class of sm_llm.spec.field_classes for: {', '.join(missing)}"


class _Inner(SpecModel):
    inherits: int = 0
    own: Annotated[int, WORK] = 0


class _Outer(SpecModel):
    free: Annotated[_Inner, FREE] = _Inner()
    forgotten: _Inner = _Inner()
    listed: dict[str, _Inner] = Field(default_factory=dict)
    plain: int = 0


def test_B4_a_field_without_a_class_is_found_however_deep_it_lies() -> None:
    assert list(unclassified(_Outer)) == ["forgotten.inherits", "listed.inherits", "plain"]


def test_fields_have_the_class_of_their_block_unless_they_declare_their_own() -> None:
    found = {leaf.path: leaf.declared for leaf in leaves(_Outer())}
    assert (found["free.inherits"], found["free.own"]) == (FREE, WORK)


def job(**task: Any) -> JobSpec:
    model = {"preset": "tiny"}
    data = {"format": "synthetic", "seq_length": 16}
    value = {"name": "job", "task": {"kind": "train", "model": model, "data": data, "max_steps": 4, **task}}
    return JobSpec.model_validate(value, strict=False)


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("task.model.config={num_hidden_layers: 1}", FieldClass.MODEL),
        ("task.data.shuffle=false", FieldClass.ORDER),
        ("task.data.seq_length=8", FieldClass.ORDER),
        ("task.seed=1", FieldClass.ORDER),
        ("task.global_batch_size=8", FieldClass.ORDER),
        ("task.tokenizer=there", FieldClass.ORDER),
        ("task.max_steps=5", FieldClass.SCHEDULE),
        ("task.optim.learning_rate=1", FieldClass.SCHEDULE),
        ("task.optim.betas=[0.8, 0.9]", FieldClass.OPTIMISER),
        ("task.optim.weight_decay=0", FieldClass.OPTIMISER),
        ("task.not_finite.policy=skip", FieldClass.OPTIMISER),
        ("task.precision.compute=fp32", FieldClass.PRECISION),
        ("task.deterministic=true", FieldClass.PRECISION),
        ("task.parallelism.sharding=none", FieldClass.PLACEMENT),
        ("compute.processes_per_instance=2", FieldClass.PLACEMENT),
        ("environment.A=b", FieldClass.PLACEMENT),
        ("task.start=scratch", FieldClass.START),
    ],
)
def test_A2_what_changes_the_result_makes_another_specification(override: str, kind: FieldClass) -> None:
    now = changed(job(), [override]).spec
    assert {it.field_class for it in spec_differences(job(), now)} == {kind}


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "storage=elsewhere",
        "storage_options.region=eu-west-1",
        "secrets.A=env:B",
        "backend.stop_seconds=5",
        "task.logging.every_steps=1",
        "task.logging.sinks.tensorboard={}",
        "task.logging.sample_prompt=hello",
        "task.watchdog.stall_seconds=5",
        "task.checkpoint.keep_last=9",
        "task.checkpoint.every_steps=2",
        "task.checkpoint.verify_state=true",
    ],
)
def test_A2_what_changes_nothing_in_the_result_is_the_same_specification(override: str) -> None:
    assert spec_differences(job(), changed(job(), [override]).spec) == []


def test_a_difference_names_the_field_both_values_and_the_class() -> None:
    (found,) = spec_differences(job(), changed(job(), ["task.optim.betas=[0.8, 0.9]"]).spec)
    assert str(found) == "task.optim.betas: [0.9, 0.95] -> [0.8, 0.9] (optimiser)"
