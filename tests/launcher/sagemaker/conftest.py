"""Jobs for SageMaker, planned and rendered without an account."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.contract.job_file import JobFile
from sm_llm.errors import PlanError, SpecError
from sm_llm.launcher.backend import backend
from sm_llm.launcher.planner import plan, plan_loaded
from sm_llm.launcher.planning.bundle import package_files
from sm_llm.spec.loading.load import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from sm_llm.errors import Issue
    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan

ROLE = "arn:aws:iam::123456789012:role/SageMaker"
RUN_STAMP = "20261128-040000-ab12"
TINY: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64},
        "max_steps": 10,
    },
    "compute": {"instance_type": "ml.p5.48xlarge", "instance_count": 2},
    "backend": {"name": "sagemaker", "role": ROLE, "region": "us-west-2"},
    "storage": "s3://bucket/runs",
}
SCRIPT: dict[str, Any] = {
    **TINY,
    "task": {"kind": "script", "entry": "train.py"},
    "backend": {**TINY["backend"], "max_run_seconds": 3600},
}


@pytest.fixture(scope="session")
def package() -> dict[str, bytes | Path]:
    """This package's files, read once: a checkout in which somebody works must not change between two launches."""
    return {name: path.read_bytes() for name, path in package_files().items() if isinstance(path, Path)}


@pytest.fixture(autouse=True)
def _same_package(package: dict[str, bytes | Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm_llm.launcher.planning.bundle.package_files", lambda: package)


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither this machine's AWS settings nor an administrator's defaults are read."""
    nowhere = str(tmp_path_factory.getbasetemp() / "nowhere")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", nowhere)
    monkeypatch.setenv("XDG_CONFIG_DIRS", nowhere)


def plan_of(source: Any, *overrides: str, **fields: Any) -> Plan:
    return plan_loaded(load(source, overrides, fields, environ={}))[0]


def render(source: Any, *overrides: str, attempt: int = 1, **fields: Any) -> Submission:
    """The submission of a run whose id is fixed."""
    plan = plan_of(source, *overrides, **fields)
    run_id = f"{plan.job.name}-{RUN_STAMP}"
    job = JobFile(
        run_id=run_id,
        attempt=attempt,
        run_uri=f"{plan.job.storage}/{run_id}",
        spec=plan.job,
        spec_digest=plan.digest,
    )
    return backend("sagemaker").render(plan, job)


@pytest.fixture
def faults() -> Callable[..., list[Issue]]:
    """Every fault of a job, whichever stage finds it."""

    def found(source: Any, *overrides: str, **fields: Any) -> list[Issue]:
        try:
            plan(source, *overrides, **fields)
        except (PlanError, SpecError) as error:
            return list(error.issues)
        return []

    return found
