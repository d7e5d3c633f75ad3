"""Plans and scripts for Slurm."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

import sm_llm
from sm_llm.launcher.job_inputs import rendered
from sm_llm.storage.uri import join

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.backend import Submission

VENV = {"name": "slurm", "shared_folder": "/fsx/sm_llm", "virtual_environment": "/fsx/venv"}
TINY: dict[str, Any] = {
    "name": "tiny",
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64, "rows": 100},
        "max_steps": 2,
    },
    "compute": {"instance_count": 2, "processes_per_instance": 1},
    "storage": "/fsx/runs",
    "backend": VENV,
}


def render(source: Any, attempt: int = 1, **fields: Any) -> Submission:
    """What would be submitted for a job whose run has a fixed id."""
    [plan] = sm_llm.plan(source, **fields)
    run_id = f"{plan.job.name}-20261128-040000-ab12"
    return rendered(plan, run_id, join(plan.job.storage, run_id), attempt=attempt)


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that gets what the script's srun was given."""
    programs, spied = tmp_path / "bin", tmp_path / "spied"
    programs.mkdir()
    spied.mkdir()
    (programs / "srun").write_text(
        f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {spied}/argv\nprintf '%s' \"$NAME\" > {spied}/name\nexit 7\n"
    )
    (programs / "scontrol").write_text(
        f'#!/bin/bash\n[ "$1" != show ] || exec echo node1\nprintf \'%s \' "$@" > {spied}/scontrol\n'
    )
    # Only noted: what a job writes to are folders of a cluster, and tests may run as root.
    (programs / "mkdir").write_text(f"#!/bin/bash\nprintf '%s\\0' \"$@\" > {spied}/mkdir\n")
    (programs / "sleep").write_text("#!/bin/bash\nread -rt 0.05 <> <(:)\nexit 0\n")
    for program in programs.iterdir():
        program.chmod(0o700)
    variables = {"SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "run-1", "SLURM_JOB_NODELIST": "node[1-2]"}
    variables["SLURM_JOB_NUM_NODES"] = "2"
    for name, value in {**variables, "PATH": f"{programs}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    return spied
