"""A new strategy is an options class, a class with the methods of the interface, and a row: nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of it in a process of its own: the row is there before the specification is loaded."""
    folder = tmp_path_factory.mktemp("example")
    argv = [sys.executable, "-m", "tests.worker.example_session", str(folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    environ |= {"XDG_CONFIG_HOME": str(folder), "AWS_CONFIG_FILE": os.devnull}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_its_class_refuses_what_its_engine_cannot_do(found: dict[str, Any]) -> None:
    assert found["several"] == ["example-on-several"]
    assert found["compile"] == ["compile-unsupported"]
    assert "strategy-not-for-trainium" in found["trainium"]


def test_it_is_rendered_and_estimated_as_an_engine_for_gpus(found: dict[str, Any]) -> None:
    text = json.dumps(found["request"])
    assert "pytorch-training:" in text
    assert "sagemaker_torch_distributed_enabled" in text
    assert "mp_parameters" not in text
    assert found["memory"] is True


def test_it_trains_as_a_plain_loop_does(found: dict[str, Any]) -> None:
    assert found["whole"] == 0
    assert found["losses"].keys() == found["plain"].keys()
    assert max(abs(loss - found["plain"][step]) for step, loss in found["losses"].items()) < 1e-5
    assert {"config.json", "model.safetensors"} <= set(found["result"])


def test_it_continues_bit_for_bit(found: dict[str, Any]) -> None:
    assert (found["broken"], found["continued"]) == (1, 0)
    assert found["starts"] == [0, 6]
    assert found["equal"]
