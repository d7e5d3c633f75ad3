"""A new backend is an options class, a class with the methods of the interface, and a row: nothing else is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the public verbs answer, in a process of its own: rows are there before the specification is loaded."""
    folder = tmp_path_factory.mktemp("example")
    argv = [sys.executable, "-m", "tests.launcher.example_session", str(folder)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    environ |= {"XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_its_options_are_checked_and_its_issues_are_the_plans(found: dict[str, Any]) -> None:
    code, text = found["without a queue"]
    assert code == 2
    assert "backend.queue" in text
    assert "there is no queue" in text


def test_a_plan_shows_what_it_decided_and_a_dry_run_what_it_would_send(found: dict[str, Any]) -> None:
    plan = found["plan"]
    assert plan["backend"] == "example"
    assert plan["command"] == [["script", "0"], ["script", "1"]]
    (submission,) = found["dry run"]
    assert submission["request"] == {"queue": plan["facts"]["queue"], "command": plan["command"]}


def test_it_is_started_once_and_found_by_every_address(found: dict[str, Any]) -> None:
    assert found["pending"] == "pending"
    code, text = found["again"]
    assert (code, "is running already" in text) == (2, True), text
    assert found["by uri"]
    assert found["by its own words"]


def test_it_is_followed_and_stopped(found: dict[str, Any]) -> None:
    assert found["status"]["state"] == "running"
    assert found["status"]["native_uri"].startswith("example:///")
    assert found["logs"] == ["[node 0] one", "[node 0] two"], "a job of two nodes"
    assert found["unknown"] == ["unknown", "COMPLETING"]
    assert found["stop"][0] == 0, found["stop"]
    assert (found["stopped"], found["attempts"]) == ("stopped", ["stopped"])


def test_what_it_does_not_offer_is_refused_in_one_line(found: dict[str, Any]) -> None:
    code, text = found["shell"]
    assert code != 0
    assert "is in no container that a shell could enter" in text
    assert "backend.name: does not run workflows" in found["workflow"]
    assert found["runs"], "a workflow that is refused leaves nothing behind"
