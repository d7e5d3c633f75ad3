"""Numbers that are possible and cannot be meant: time limits without one saved step, rates that ruin every weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.launcher.sagemaker.conftest import TINY, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.errors import Issue

    Faults = Callable[..., list[Issue]]

LARGE = ("task.model.preset=llama-2-70b", "task.data.seq_length=4096", "compute.instance_type=ml.p4de.24xlarge")


@pytest.mark.parametrize("limit", [1, 60, 239])
def test_C12_a_time_limit_that_leaves_no_time_to_save_is_refused(limit: int, faults: Faults) -> None:
    (fault,) = faults(TINY, f"backend.max_run_seconds={limit}")
    assert (fault.path, fault.value) == ("backend.max_run_seconds", limit)
    assert "to save a checkpoint" in fault.message
    assert faults(TINY, "backend.max_run_seconds=240") == []


def test_C12_a_time_limit_that_ends_before_one_step_is_saved_is_refused(faults: Faults) -> None:
    batch = "task.global_batch_size=16384"
    (fault,) = [it for it in faults(TINY, *LARGE, batch, "backend.max_run_seconds=600") if it.path.endswith("seconds")]
    assert "ends before one step is saved" in fault.message
    needed = int(fault.remedy.split()[3].rstrip(","))
    found = faults(TINY, *LARGE, batch, f"backend.max_run_seconds={needed}")
    assert [it for it in found if it.path.endswith("seconds")] == []


def test_C12_a_time_limit_that_cuts_the_training_is_warned_of() -> None:
    job = ("task.model.preset=llama-2-7b", "task.data.seq_length=4096", "task.max_steps=1000000")
    assert any("1,000,000 steps take" in it for it in plan_of(TINY, *job, "backend.max_run_seconds=3600").warnings)
    assert not any("steps take" in it for it in plan_of(TINY, "backend.max_run_seconds=3600").warnings)


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("task.optim.learning_rate=100", "task.optim.learning_rate"),
        ("task.optim.learning_rate=1.5", "task.optim.learning_rate"),
        ("task.optim.min_learning_rate=2", "task.optim.min_learning_rate"),
        ("task.optim={learning_rate: 0.5, weight_decay: 2}", "task.optim.weight_decay"),
    ],
)
def test_C12_a_rate_that_no_training_survives_is_refused(override: str, path: str, faults: Faults) -> None:
    assert path in [it.path for it in faults(TINY, override)]


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ({"learning_rate": 0.5}, "moves every weight by about 0.5"),
        ({"warmup_steps": 10}, "the warm-up spans all 10 steps"),
        ({"decay_fraction": 0.5}, "task.optim.decay_fraction: has no effect with schedule cosine"),
        ({"schedule": "constant", "min_learning_rate": 1e-5}, "has no effect with schedule constant"),
        ({"plateau_factor": 0.1, "schedule": "linear"}, "it is for plateau"),
        ({"plateau_patience": 7}, "task.optim.plateau_patience: has no effect"),
    ],
)
def test_C12_a_setting_without_effect_or_with_a_strange_one_is_warned_of(optim: dict[str, Any], words: str) -> None:
    warnings = plan_of(TINY, task={"optim": optim}).warnings
    assert any(words in warning for warning in warnings)


@pytest.mark.parametrize(
    "optim",
    [
        {"learning_rate": 0.02}, {"schedule": "wsd", "decay_fraction": 0.5}, {"warmup_steps": 9},
        {"schedule": "plateau", "plateau_factor": 0.1, "min_learning_rate": 1e-5},
    ],
)  # fmt: skip
def test_C12_usual_settings_are_not_warned_of(optim: dict[str, Any]) -> None:
    data = {"format": "rows", "train": "s3://bucket/rows/train", "validation": "s3://bucket/rows/validation"}
    planned = plan_of(TINY, task={"optim": optim, "data": {**data, "seq_length": 64}})
    assert not [it for it in planned.warnings if it.startswith("task.optim")]
