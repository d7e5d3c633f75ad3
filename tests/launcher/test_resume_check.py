"""The resume check proves that a broken run continues exactly: what it compares, and all of it by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import SpecError
from sm_llm.launcher.tools.resume_check import ResumeCheck, check_resume

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fixtures.preloaded import Preloaded

Fakes = Any
GOOD: dict[str, Any] = {
    "steps": 24,
    "device": "cpu",
    "must_be_equal": True,
    "continued_from": (8, 16),
    "equal_losses": 24,
    "largest_loss_difference": 0.0,
    "equal_rates": 24,
    "restored_states": 2,
    "equal_last_state": True,
    "runs": ("a", "b"),
}


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"equal_losses": 23}, False),
        ({"equal_rates": 23}, False),
        ({"equal_last_state": False}, False),
        ({"continued_from": (0, 16)}, False),
        ({"continued_from": (8,)}, False),
        ({"restored_states": 1}, False),
        ({"must_be_equal": False, "equal_losses": 3, "equal_last_state": False}, True),
        ({"must_be_equal": False, "equal_rates": 23}, False),
        ({"must_be_equal": False, "restored_states": 0}, False),
    ],
)
def test_what_counts_as_exact(change: dict[str, Any], ok: bool) -> None:
    proof = ResumeCheck(**{**GOOD, **change})
    assert proof.ok is ok
    assert ("resume is exact" in proof.text()) is ok
    assert ("the runs are kept: a, b" in proof.text()) is not ok


def test_what_cannot_be_proved_is_refused_before_anything_starts(fakes: Fakes) -> None:
    with pytest.raises(SpecError, match="no training to prove"):
        check_resume({"name": "p", "task": {"kind": "prepare", "sources": ["builtin:python-docs"], "seq_length": 8}})
    with pytest.raises(SpecError, match="At least 6"):
        check_resume(fakes.spec(), steps=5)
    assert not fakes.storage.exists() or not list(fakes.storage.iterdir())


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_doctor_proves_exact_resume(processes: int, fakes: Fakes, preloaded: Preloaded, tmp_path: Path) -> None:
    """With one process it is the same again, and every process is started as a user's is."""
    if processes == 1:
        preloaded.off()
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(fakes.spec()))
    command = [sys.executable, "-m", "sm_llm.cli", "doctor", "--resume-proof", str(job), "--json"]
    command += [f"compute.processes_per_instance={processes}", "task.global_batch_size=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert proof["ok"]
    assert proof["equal_losses"] == proof["equal_rates"] == proof["steps"] == 24
    assert proof["continued_from"] == [8, 16]
    assert proof["equal_last_state"]
    assert list(fakes.storage.glob("*")) == []
