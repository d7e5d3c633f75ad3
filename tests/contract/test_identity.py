"""What a checkpoint is a state of, and which differences end its continuation."""

from __future__ import annotations

from typing import Any

import pytest

from sm_llm.contract.identity import DATA_CONTENT, Identity, WaysOut, differences, identity, recorded_identity, refusals
from sm_llm.models.config import model_config
from sm_llm.spec.derive import derive_task
from sm_llm.spec.job import JobSpec
from sm_llm.spec.loading.load import changed
from sm_llm.spec.tasks import TrainTask

CONFIG = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TASK: dict[str, Any] = {
    "kind": "train",
    "model": {"preset": "tiny", "config": CONFIG},
    "data": {"format": "synthetic", "seq_length": 16, "rows": 96},
    "global_batch_size": 8,
    "max_steps": 100,
    "optim": {"warmup_steps": 5},
    "precision": {"compute": "fp32"},
}


def of(*overrides: str, data: str = "one") -> Identity:
    spec = changed(JobSpec.model_validate({"name": "job", "task": TASK}, strict=False), overrides).spec
    task = spec.task  # type: ignore[union-attr]
    assert isinstance(task, TrainTask)
    config = model_config(preset=task.model.preset, path=None, pretrained=None, overrides=task.model.config)
    return identity(task, config, derive_task(task, 1), contents={DATA_CONTENT: data}, rows=96)


def refused(now: Identity, before: Identity | None = None, *, stated: bool = False, **how: Any) -> list[str]:
    before = of() if before is None else before
    asked = {"is_own": True, "allow_other_data": False, "is_stated": stated, **how}
    ways = WaysOut("/runs/job-1", ("task.seed=3",), asked.pop("by_fit", False))
    return [str(it) for it in refusals(differences(before, now), now, 40, ways, **asked)]


@pytest.mark.parametrize(
    "override",
    [
        "task.model.config.num_hidden_layers=1",
        "task.model.config.num_attention_heads=2",
        "task.model.config.num_key_value_heads=4",
        "task.model.config.rope_theta=500000",
        "task.model.config.tie_word_embeddings=false",
        "task.model.config.vocab_size=512",
        "task.model.config.rms_norm_eps=1e-3",
        "task.model.config.hidden_act=gelu",
        "task.model.config.attention_dropout=0.5",
    ],
)
def test_F1_another_model_is_refused_by_the_name_of_its_field(override: str) -> None:
    (reported,) = refused(of(override))
    field = override.partition("=")[0].rpartition(".")[2]
    assert field in reported or field == "rope_theta"
    assert "another model" in reported
    assert "begin another run: sm-llm rerun /runs/job-1 task.seed=3;" in reported


def test_12f_a_field_that_one_config_leaves_out_is_compared_with_the_value_in_effect() -> None:
    stated, left_out = of("task.model.config.head_dim=24"), of()
    assert "task.model.config.head_dim" not in left_out["model"], "it is hidden_size / num_attention_heads"
    (reported,) = refused(stated)
    assert "task.model.config.head_dim: was 12 when the checkpoint was saved" in reported
    assert "(got 24). Set it to 12" in reported
    (reported,) = refused(left_out, stated)
    assert "was 24" in reported
    assert "(got 12)" in reported
    assert refused(of("task.model.config.head_dim=12")) == []
    other = {**left_out, "model": {**left_out["model"], "task.model.config.partial_rotary_factor": 0.5}}
    (reported,) = refused(other)
    assert "partial_rotary_factor: was null" in reported, "of a field that no family knows"


def test_12f_the_range_of_initial_values_has_no_effect_on_weights_that_a_checkpoint_brings() -> None:
    now = of("task.model.config.initializer_range=0.5")
    for is_own in (True, False):
        (reported,) = refused(now, is_own=is_own)
        assert "task.model.config.initializer_range: has no effect: the weights are those of the checkpoint" in reported
    assert "Set it to 0.02, or begin another run: sm-llm rerun" in refused(now)[0]


@pytest.mark.parametrize(
    "override",
    [
        "task.data.shuffle=false",
        "task.data.seq_length=8",
        "task.data.rows=97",
        "task.seed=1",
        "task.global_batch_size=4",
    ],
)
def test_F1_another_order_of_data_is_refused_with_both_ways_out(override: str) -> None:
    (reported,) = refused(of(override))
    assert override.partition("=")[0] in reported
    assert "Set it to" in reported
    assert "sm-llm branch /runs/job-1 task.seed=3 task.start.allow_other_data=true" in reported


def test_F1_data_that_were_edited_in_place_are_refused_and_another_place_is_not() -> None:
    (reported,) = refused(of(data="edited"))
    assert DATA_CONTENT in reported
    assert "Continue with the same data" in reported
    assert refused(of("task.logging.every_steps=7")) == []


def test_F1_other_data_are_for_another_run_that_asks_for_them() -> None:
    now = of("task.seed=1", data="other")
    assert len(refused(now, is_own=False)) == 2
    assert refused(now, is_own=False, allow_other_data=True) == []
    assert len(refused(now, is_own=True, allow_other_data=True)) == 2, "a run's own order cannot change"
    model = of("task.model.config.num_hidden_layers=1")
    assert len(refused(model, is_own=False, allow_other_data=True)) == 1, "nor can a checkpoint's model"


@pytest.mark.parametrize(
    ("override", "reported"),
    [
        ("task.optim.betas=[0.8, 0.9]", "task.optim.betas: [0.9, 0.95] -> [0.8, 0.9] (optimiser)"),
        ("task.optim.weight_decay=0", "task.optim.weight_decay: 0.1 -> 0.0 (optimiser)"),
        ("task.optim.learning_rate=1e-3", "task.optim.learning_rate: 0.0003 -> 0.001 (schedule)"),
        ("task.precision.master=bf16", "task.precision.master: fp32 -> bf16 (precision)"),
        ("task.parallelism.sharding=none", "task.parallelism.sharding: full -> none (placement)"),
    ],
)
def test_F1_other_differences_are_named_and_not_refused(override: str, reported: str) -> None:
    overrides = [override, *(["task.precision.compute=bf16"] if "master" in override else [])]
    now = of(*overrides)
    assert reported in [str(it) for it in differences(of(), now)]
    assert refused(now) == []


@pytest.mark.parametrize(
    "override", ["task.logging.every_steps=1", "task.watchdog.enabled=false", "task.model.config.use_cache=false"]
)
def test_what_changes_nothing_is_not_a_difference(override: str) -> None:
    assert differences(of(), of(override)) == []


def test_a_value_that_is_spelt_in_another_way_is_the_same() -> None:
    assert differences(of(), of("task.max_steps=null", f"task.max_tokens={100 * 8 * 16}")) == []
    assert differences(of(), of("task.model.config.rope_theta=10000")) == []


def test_a_schedule_of_another_length_must_be_stated() -> None:
    (reported,) = refused(of("task.max_steps=200"))
    assert "the cosine schedule spanned 100 steps and would now span 200" in reported
    assert "State task.optim.schedule_steps=100 to keep its course after step 40" in reported
    assert "task.optim.schedule_steps=200 for the new one" in reported
    assert refused(of("task.max_steps=200"), stated=True) == []
    assert refused(of("task.max_steps=200"), is_own=False) == [], "a branch is for that"


@pytest.mark.parametrize(("warmup", "count"), [(5, 0), (3, 1)])
def test_a_constant_rate_has_no_length_but_its_warm_up_may(warmup: int, count: int) -> None:
    constant = "task.optim.schedule=constant"
    before = of(constant, "task.max_steps=60", f"task.optim.warmup_steps={warmup}")
    assert len(refused(of(constant), before)) == count


def test_checkpoints_of_earlier_releases_are_compared_in_what_they_know() -> None:
    old = recorded_identity({"job": {"total_steps": 100, "seed": 7, "rows": 100, "world_size": 2}})
    reported = "\n".join(refused(of(), old))
    assert "task.seed" in reported
    assert "was 7" in reported
    assert "number of rows" in reported
    assert differences(recorded_identity({}), of()) == []


def test_A2_a_fit_after_a_data_edit_names_run_step_and_new() -> None:
    (reported,) = refused(of(data="two"), by_fit=True)
    for words in ("step 40 of /runs/job-1", "the same command with --new", "sm-llm branch /runs/job-1"):
        assert words in reported


def test_B4_a_rerun_from_a_checkpoint_names_the_start_and_the_way_out() -> None:
    (reported,) = refused(of("task.model.config.num_hidden_layers=1"), is_own=False)
    assert "that this run starts from (step 40 of /runs/job-1)" in reported
    assert "task.start=scratch" in reported
    assert "sm-llm" not in reported


@pytest.mark.parametrize("block", [5, "x", [], [1], True, {"a": 5}, {"data": 5}, {"data": [1]}, {"data": None}])
def test_s12_a_commit_of_another_form_is_compared_without_it(block: Any) -> None:
    now = of()
    assert differences(recorded_identity({"identity": block}), now) == []
    assert differences(recorded_identity({"identity": None, "job": block}), now) == []
