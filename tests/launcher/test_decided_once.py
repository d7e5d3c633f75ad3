"""What a plan holds is computed once: a dry run and its command make every decision one time for each job."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm import launch
from sm_llm.contract import memory_planner
from sm_llm.launcher import planner
from sm_llm.launcher.backends.local.backend import LocalBackend
from sm_llm.launcher.backends.sagemaker import plan_checks
from sm_llm.launcher.backends.sagemaker.request import capacity, request, settings
from sm_llm.launcher.backends.sagemaker.request import distribution as starting
from sm_llm.launcher.images import images
from sm_llm.spec import derive
from tests.cli.test_typed_faults import cli_output

if TYPE_CHECKING:
    from collections.abc import Iterator

DECISIONS = {
    "plan": planner.plan_job,
    "decisions": plan_checks.decide,
    "settings": settings.settings,
    "distribution": starting.distribution,
    "image": images.choose,
    "time limit": capacity.time_limit,
    "request": request.training_job,
}
NUMBERS = {"derived numbers": derive.derive}
FIXED = (
    "task.micro_batch_size=2",
    "task.precision.compile=true",
    "task.parallelism.activation_checkpointing=selective",
    "task.parallelism.reshard_after_forward=true",
)
"""Nothing is left to the planner, which derives the numbers of whatever it tries."""
ACCOUNT = ("backend.role=arn:aws:iam::123456789012:role/x", "backend.region=us-east-1", "storage=s3://bucket-x/x")


@contextmanager
def calls(functions: dict[str, Any]) -> Iterator[Counter[str]]:
    """How often each of ``functions`` is called, whoever holds it under which name."""
    names = {function.__code__: name for name, function in functions.items()}
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code in names:
            found[names[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    derive._derived.cache_clear()


def test_a_dry_run_decides_everything_once() -> None:
    with calls(DECISIONS | NUMBERS) as found:
        launch("llama-2-7b-fsdp", *ACCOUNT, *FIXED, dry_run=True)
    assert found == dict.fromkeys(DECISIONS | NUMBERS, 1)


def test_settings_are_chosen_once() -> None:
    with calls({"choice": memory_planner.choose}) as found:
        launch("llama-2-7b-fsdp", *ACCOUNT, dry_run=True)
    assert found == {"choice": 1}


def test_so_does_the_command_that_prints_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with calls(DECISIONS | NUMBERS) as found:
        code, _ = cli_output(monkeypatch, capsys, "fit", "llama-2-7b-fsdp", *ACCOUNT, *FIXED, "--dry-run")
    assert code == 0
    assert found == dict.fromkeys(DECISIONS | NUMBERS, 1)


def test_every_step_of_a_pipeline_is_decided_once() -> None:
    task = {"kind": "prepare", "sources": ["s3://bucket-x/text/"], "seq_length": 512}
    steps = {name: {"task": task, "compute": {"instance_type": "ml.m5.2xlarge"}} for name in ("one", "two")}
    flow = {"name": "flow", "backend": {"name": "sagemaker", "max_run_seconds": 3600}, "steps": steps}
    with calls(DECISIONS) as found:
        launch(flow, *ACCOUNT, dry_run=True)
    assert found == dict.fromkeys(DECISIONS, 2)


def test_a_local_job_is_decided_once() -> None:
    decisions = {"plan": planner.plan_job, "checks": LocalBackend.plan_checks, "target": LocalBackend._target}
    with calls(decisions) as found:
        launch("smoke", dry_run=True)
    assert found == dict.fromkeys(decisions, 1)
