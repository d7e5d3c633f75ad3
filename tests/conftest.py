"""What every test shares: quiet children, and an account of what a run left out."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

pytest_plugins = [
    "tests.fixtures.sampling",
    "tests.fixtures.s3_server",
    "tests.fixtures.fault_proxy",
    "tests.fixtures.hub_double",
    "tests.fixtures.sagemaker_double",
]

SHARING = {"test_worlds.py", "test_resume.py"}
"""Test files that read the runs of the same launches (``worker/conftest.py``)."""

_left_out: Counter[str] = Counter()
"""Tests that were not selected, by file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if any selected test was skipped")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take longest come first, else the last of them runs alone; then those of many tests.

    How long a test may take is what its own ``timeout`` says, also where that is no more than everyone's.
    """
    longest: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("timeout")
        longest[item.location[0]] = max(longest[item.location[0]], marker.args[0] if marker else 0)
    counts = Counter(item.location[0] for item in items)
    items.sort(key=lambda item: (-longest[item.location[0]], -counts[item.location[0]]))


class ByLaunch(LoadFileScheduling):  # type: ignore[misc]
    """Gives each process whole files as they are ordered here, and the files that share launches to one process."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "worlds" if PurePosixPath(file).name in SHARING else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByLaunch:
    return ByLaunch(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three processes share the tests: two would leave cores idle. What needs a GPU has the machine to itself."""
    return 0 if "not gpu" not in config.option.markexpr and "gpu" in config.option.markexpr else 3


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out.update(item.location[0] for item in items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Every process of pytest-xdist collects all tests; one of them tells what it left out."""
    if not _left_out:
        _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section("left out of this run")
        for name, count in sorted(_left_out.items()):
            terminalreporter.line(f"{name}: {count}")
        terminalreporter.line('run them with: pytest -m "integration or exhaustive" (on an NVIDIA GPU: pytest -m gpu)')


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads the user's own defaults or caches, reaches a hub or starts a thread pool per core."""
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
