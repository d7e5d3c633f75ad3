"""Runs that an earlier version wrote are read, continued and branched from (``tests/golden/previous_run.py``)."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import sm_llm
from sm_llm.cli import app
from sm_llm.errors import SubmitError
from sm_llm.launcher.find_runs import ls
from sm_llm.runs.run_states import RunState
from tests.golden.previous_run import SPEC, unpack

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run

STEPS = SPEC["task"]["max_steps"]


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    unpack(tmp_path / "runs")
    return tmp_path / "runs"


def attached(storage: Path, name: str) -> Run:
    return sm_llm.attach(next(str(it) for it in storage.iterdir() if it.name.startswith(name)))


def exact(run: Run, first: int = 1) -> list[tuple[int, str, str]]:
    return [
        (row["step"], row["loss"].hex(), row["learning_rate"].hex()) for row in run.metrics() if row["step"] >= first
    ]


def in_words(*arguments: str) -> Any:
    """What a verb prints as JSON."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_ls_status_and_metrics_read_both(storage: Path) -> None:
    found = {it.run_id.split("-")[0]: it for it in ls(storage)}
    assert {name: it.state for name, it in found.items()} == {"whole": RunState.COMPLETED, "broken": RunState.FAILED}
    whole, broken = (attached(storage, name) for name in ("whole", "broken"))
    assert [it.number for it in broken.attempts] == [1, 2]
    assert [info.step for info in broken.checkpoints(deep=True) if info.valid] == [6, 8, 10]
    assert [info.step for info in whole.checkpoints(deep=True) if info.valid] == [10, 12]
    assert [row["step"] for row in whole.metrics()] == list(range(1, STEPS + 1))
    assert exact(broken) == exact(whole)[:10]
    assert {it.name for it in whole.result.iterdir()} >= {"config.json", "model.safetensors"}
    shown = in_words("status", whole.uri)
    assert (shown["state"], shown["progress"]["step"], shown["progress"]["total_steps"]) == ("completed", STEPS, STEPS)
    assert len(in_words("metrics", whole.uri)) == STEPS
    assert in_words("ls", "--storage", str(storage))


def test_what_completed_is_not_continued(storage: Path) -> None:
    with pytest.raises(SubmitError, match="completed"):
        attached(storage, "whole").resume()


def assert_equal(now: Run, before: Run, first: int) -> None:
    """The same steps at the same rates, and losses that differ by the rounding of other kernels at most.

    The losses of one version are bit-equal (``test_resume``); a later one may sum in another order. What is not
    restored shows: without the moments of AdamW they differ by up to 5e-4.
    """
    ours, theirs = exact(now, first), exact(before, first)
    assert [(step, rate) for step, _, rate in ours] == [(step, rate) for step, _, rate in theirs]
    differences = [abs(float.fromhex(a[1]) / float.fromhex(b[1]) - 1) for a, b in zip(ours, theirs, strict=True)]
    assert max(differences) < 1e-6


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_it_is_resumed_and_its_losses_are_those_of_the_unbroken_run(storage: Path) -> None:
    broken, whole = attached(storage, "broken"), attached(storage, "whole")
    resumed = broken.resume()
    assert resumed.wait() is RunState.COMPLETED
    assert (resumed.uri, len(resumed.attempts)) == (broken.uri, 3)
    assert resumed.attempts[-1].start.step == 10
    assert_equal(resumed, whole, 1)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_it_is_branched_from_and_the_branch_has_the_same_losses(storage: Path) -> None:
    broken, whole = attached(storage, "broken"), attached(storage, "whole")
    branch = broken.branch("environment.SM_LLM_BREAK_BEFORE_STEPS=''", step=6)
    assert branch.wait() is RunState.COMPLETED
    assert branch.uri != broken.uri
    assert [row["step"] for row in branch.metrics()] == list(range(7, STEPS + 1))
    assert_equal(branch, whole, 7)
