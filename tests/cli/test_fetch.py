"""``sm-llm fetch`` in a process of its own, which finds the double of the hub by ``HF_ENDPOINT`` alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

Hub = Any
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 9000, "pytorch_model.bin": b"p" * 9000}


def fetch(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environ}
    command = [sys.executable, "-m", "sm_llm.cli", "fetch", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)


def test_fetch_states_what_it_did_and_what_was_there(hub: Hub, tmp_path: Path) -> None:
    commit = next(iter(hub.add("org/name", FILES).commits))
    first = fetch("hf://org/name", str(tmp_path / "model"))
    assert first.returncode == 0, first.stderr
    assert f"hf://org/name is commit {commit}" in first.stdout
    assert "left out (other formats of the weights): 1 file" in first.stdout
    assert "fetched and verified: 2 files, 8.8 KiB" in first.stdout
    second = json.loads(fetch("hf://org/name", str(tmp_path / "model"), "--json").stdout)
    assert (second["copied"], second["unchanged"], second["commit"]) == ([], 2, commit)
    everything = json.loads(fetch("hf://org/name", str(tmp_path / "all"), "--all-weights", "--json").stdout)
    assert len(everything["copied"]) == 3


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached"),
        ({}, "No token was sent"),
    ],
)
def test_what_goes_wrong_is_one_message(hub: Hub, tmp_path: Path, environ: dict[str, str], words: str) -> None:
    hub.add("org/gated", FILES, token="other")
    done = fetch("hf://org/gated", str(tmp_path), **environ)
    assert done.returncode == 1
    assert done.stderr.startswith("error: hf://org/gated: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
