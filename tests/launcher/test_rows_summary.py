"""The end of a preparation: its rows are counted, and the command it prints trains on them when it is typed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sm_llm(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "sm_llm.cli", *arguments]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "COLUMNS": "500"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_E19_a_small_folder_is_prepared_and_the_printed_command_trains_on_it(tmp_path: Path) -> None:
    texts = tmp_path / "some texts"  # the blank must survive the shell
    texts.mkdir()
    for number in range(3):
        (texts / f"{number}.txt").write_text(f"document {number}\n" + "the cat sat on a mat\n" * 300)
    reported = sm_llm(tmp_path, "prepare", "some texts", "--seq-length", "64", "--validation-fraction", "0.1")
    assert "too few documents (3) to hold out 0.1 of the text in whole ones" in reported
    assert "held out for validation" in reported
    command = next(line for line in reported.splitlines() if line.strip().startswith("sm-llm fit"))
    name, *arguments = shlex.split(command)
    assert name == "sm-llm"
    reported = sm_llm(tmp_path, *arguments, "task.max_steps=2")
    assert "completed" in reported
    assert "validation loss" in reported
