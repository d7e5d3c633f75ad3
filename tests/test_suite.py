"""The test suite's own tools: each is shown by a small suite that runs in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SWEEP = """
    import pytest
    from tests.fixtures.sampling import pick, sample

    @pytest.mark.parametrize(("left", "right"), sample([(n, pytest) for n in range(20)], 3), ids=str)
    def test_pair(left, right):
        assert right is pytest

    @pytest.mark.parametrize("moment", sample([pytest.param(n, id=f"at-{n}") for n in range(20)], 2))
    @pytest.mark.integration
    def test_moment(moment):
        pass

    def test_loop():
        print("picked", *pick(range(20), 3))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder of tests under this suite's own plugins and settings."""
    (tmp_path / "setup.cfg").write_text((TESTS.parent / "setup.cfg").read_text())
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/__init__.py").touch()
    for name in ("conftest.py", "fixtures", "durations.json"):
        if (TESTS / name).exists():
            (tmp_path / "tests" / name).symlink_to(TESTS / name)
    return tmp_path


def run(suite: Path, source: str, *options: str, file: str = "tests/test_it.py") -> str:
    """The output of pytest for one file of tests."""
    indent = re.match(r"\n( *)", source)
    (suite / file).write_text(re.sub(f"(?m)^{indent[1]}", "", source) if indent else source)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=suite, env=environ, capture_output=True, text=True, timeout=240)
    return done.stdout + done.stderr


def cases(output: str) -> set[str]:
    return set(re.findall(r"::(test_\w+\[.*?\])", output))


def test_sweep_is_sampled(suite: Path) -> None:
    """A seed draws the same cases in every process; another seed draws others; the marker runs them all."""
    first = run(suite, SWEEP, "-v", "-n", "2", "--sample-seed", "1")
    again = run(suite, SWEEP, "-v", "-n", "0", "-s", "--sample-seed", "1")
    other = run(suite, SWEEP, "-v", "-n", "0", "--sample-seed", "2")
    assert cases(first) == cases(again) != cases(other)
    assert len(cases(first)) == len(cases(other)) == 3
    assert "--sample-seed 1)" in first
    assert re.search(r"test_it\.py: 37\n", first)
    assert len(re.search(r"picked ([\d ]+)", again)[1].split()) == 3  # type: ignore[index]


def test_sweep_of_integration_tests(suite: Path) -> None:
    sampled = run(suite, SWEEP, "-v", "-n", "0", "-m", "integration", "--sample-seed", "1")
    assert len(cases(sampled)) == 2
    whole = run(suite, SWEEP, "-v", "-n", "0", "-s", "-m", "integration or exhaustive")
    assert len(cases(whole)) == 20 + 17
    assert "sweeps: every case" in whole
    assert len(cases(run(suite, SWEEP, "-v", "-n", "0", "-m", "exhaustive"))) == 18 + 17


def test_seed_rotates_by_day(suite: Path) -> None:
    assert re.search(r"--sample-seed 20\d{6}\)", run(suite, SWEEP, "-n", "0"))
