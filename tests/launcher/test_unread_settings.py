"""Settings that another one makes useless are warned of by name, and every setting has been judged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.launcher.planner import plan
from sm_llm.launcher.planning.checks import _OF_SCHEDULES, OF_PREPARATIONS, OF_TRAININGS
from sm_llm.spec.schema import blocks
from sm_llm.spec.tasks import TrainTask
from sm_llm.spec.training import CheckpointSpec, NotFiniteSpec, OptimSpec, WatchdogSpec

if TYPE_CHECKING:
    from sm_llm.spec.base import SpecModel

CODE = "setting-without-effect"
JOB: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "kind": "train", "model": {"preset": "tiny"}, "max_steps": 20, "micro_batch_size": 1,
        "data": {"format": "synthetic", "seq_length": 64, "rows": 64},
    },
    "compute": {"processes_per_instance": 1},
}  # fmt: skip
CASES = {
    "logging.sample_prompt": (["logging.sample_prompt=hello"], []),
    "logging.sample_tokens": (["logging.sample_tokens=5"], ["logging.sample_prompt=a"]),
    "logging.profile.every_steps": (["logging.profile={every_steps: 21}"], ["logging.profile.every_steps=20"]),
    "validation.max_rows": (["validation.max_rows=3"], ["data.validation_rows=4"]),
    "checkpoint.keep_every_steps": (
        ["checkpoint.every_steps=5", "checkpoint.keep_every_steps=7"],
        ["checkpoint.keep_every_steps=10"],
    ),
    "watchdog.stall_factor": (["watchdog.enabled=false", "watchdog.stall_factor=3"], ["watchdog.enabled=true"]),
    "watchdog.stall_seconds": (["watchdog.enabled=false", "watchdog.stall_seconds=3"], ["watchdog.enabled=true"]),
    "watchdog.start_seconds": (["watchdog.enabled=false", "watchdog.start_seconds=3"], ["watchdog.enabled=true"]),
    "not_finite.limit": (["not_finite.limit=3"], ["not_finite.policy=skip"]),
    "optim.decay_embeddings": (
        ["optim.weight_decay=0", "optim.decay_embeddings=false"],
        ["optim.weight_decay=0.1"],
    ),
    "optim.schedule_steps": (
        ["optim.schedule=constant", "optim.schedule_steps=9"],
        ["optim.warmup_fraction=0.1"],
    ),
    "parallelism.sequence_parallel": (
        ["parallelism.sequence_parallel=false"],
        ["parallelism.tensor_parallel_degree=2", "compute.processes_per_instance=2"],
    ),
    "parallelism.reshard_after_forward": (
        ["parallelism.sharding=none", "parallelism.reshard_after_forward=false"],
        ["parallelism.sharding=full"],
    ),
    "model.config.dtype": (["model.config.dtype=float16"], []),
    "model.config.torch_dtype": (["model.config.torch_dtype=float16"], []),
}
"""Path -> changes that leave it without an effect, and further ones with which it has one."""
ALWAYS = {
    "optim": {"name", "learning_rate", "betas", "eps", "weight_decay", "max_grad_norm", "schedule", "warmup_steps",
              "warmup_fraction"},
    "checkpoint": {"every_steps", "keep_last", "async_save", "max_blocking_seconds", "max_unpublished_seconds",
                   "verify_state"},
    "validation": {"every_steps"},  # check_validation_rows
    "logging": {"every_steps", "profile", "sinks"},
    "logging.profile": {"steps", "all_processes"},
    "not_finite": {"policy"},
    "watchdog": {"enabled"},
}  # fmt: skip
"""Block of a training -> the settings that are read whatever the others are, or that another check judges."""


def typed(changes: list[str]) -> list[str]:
    return [it if it.startswith("compute.") else f"task.{it}" for it in changes]


def found(*changes: str, job: dict[str, Any] = JOB) -> dict[str, str]:
    (made,) = plan(job, *changes)
    return {it.path: it.message for it in made.issues if it.code == CODE}


@pytest.mark.parametrize("path", OF_TRAININGS)
def test_a_setting_that_nothing_reads_is_warned_of_until_something_does(path: str) -> None:
    without, enough = CASES[path]
    assert f"task.{path}" in found(*typed(without))
    if enough:
        assert f"task.{path}" not in found(*typed([*without, *enough]))


def test_defaults_are_not_warned_of() -> None:
    assert not found()
    assert not found("task.optim.weight_decay=0", "task.watchdog.enabled=false", "task.parallelism.sharding=none")


def test_a_plateau_without_validation_never_falls() -> None:
    (made,) = plan(JOB, "task.optim.schedule=plateau")
    assert "the rate never falls" in "".join(made.warnings)
    (made,) = plan(JOB, "task.optim.schedule=plateau", "task.data.validation_rows=4")
    assert "the rate never falls" not in "".join(made.warnings)


def test_threads_of_two_kinds_are_warned_of() -> None:
    assert "backend.threads_per_process" in found("backend.threads_per_process=2", "environment.OMP_NUM_THREADS=9")
    assert not found("backend.threads_per_process=2")


def test_a_seed_that_chooses_nothing_is_warned_of(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("text " * 99)
    job = {"name": "p", "task": {"kind": "prepare", "sources": [str(tmp_path / "a.txt")], "seq_length": 8, "seed": 3}}
    assert set(found(job=job)) == {f"task.{it}" for it in OF_PREPARATIONS} == {"task.seed"}
    assert not found("task.validation_fraction=0.5", job=job)


def test_every_setting_of_a_training_was_judged() -> None:
    """Whoever adds one decides whether another can make it useless."""
    for block, always in ALWAYS.items():
        kind: type[SpecModel] = TrainTask
        for name in block.split("."):
            (kind,) = blocks(kind.model_fields[name].annotation)
        known = {name for name in kind.model_fields if f"{block}.{name}" in OF_TRAININGS}
        judged = always | known | (set(_OF_SCHEDULES) if kind is OptimSpec else set())
        assert judged == set(kind.model_fields), block
    assert {OptimSpec, CheckpointSpec, NotFiniteSpec, WatchdogSpec} <= {
        block for field in TrainTask.model_fields.values() for block in blocks(field.annotation)
    }
