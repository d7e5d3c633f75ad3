"""Pretrained weights are loaded sharded: no process ever holds the whole model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "load_weights.py"


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_each_of_two_processes_takes_memory_for_its_half(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAM), "--megabytes", "300", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loading = [float(share) for share in re.findall(r"loading ([\d.]+)", done.stdout)]
    assert len(loading) == 2
    assert all(0.45 < share < 0.7 for share in loading), done.stdout
