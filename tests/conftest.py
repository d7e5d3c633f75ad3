"""What every test shares: quiet children, and an account of what a run left out."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests import durations

os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
"""No thread pool per core, and where a process has several threads all the same, those that wait sleep: on a busy
machine they would use up several times the computation's own CPU time by asking again and again. torch reads it when it
is imported, which a test file may do before any test runs."""
os.environ["HF_HUB_OFFLINE"] = "1"
"""A name of the hub that a test does not serve itself (``tests/fixtures/hub_double.py``) is an error at once; without a
network the library would try for 23 seconds. Set here, since it reads the variable when it is imported."""

pytest_plugins = [
    "tests.fixtures.sampling",
    "tests.fixtures.timing",
    "tests.fixtures.s3_server",
    "tests.fixtures.fault_proxy",
    "tests.fixtures.retry_clock",
    "tests.fixtures.hub_double",
    "tests.fixtures.sagemaker_double",
    "tests.fixtures.diagnostics",
    "tests.fixtures.preloaded",
    "tests.fixtures.old_stack",
    "tests.fixtures.slurm",
    "tests.fixtures.kubernetes_double",
]

SHARING = {"test_worlds.py", "test_resume.py"}
"""Test files that read the runs of the same launches (``worker/conftest.py``)."""

_left_out: Counter[str] = Counter()
"""Tests that were not selected, by file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail if any selected test was skipped")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, else the last of them runs alone.

    ``durations.json`` has their times; a file never measured is taken to last as its longest ``timeout`` allows.
    """
    if unstable := [it.nodeid for it in items if " object at 0x" in it.nodeid]:
        raise pytest.UsageError(f"give parametrize ids without addresses, the same in all processes: {unstable[0]}")
    measured = durations.read()
    known = {suite: {name: file.seconds for name, file in files.items()} for suite, files in measured.items()}
    limits: Counter[str] = Counter()
    suites: dict[str, set[str]] = {}
    for item in items:
        name, marker = item.location[0], item.get_closest_marker("timeout")
        limits[name] = max(limits[name], marker.args[0] if marker else 0)
        suites.setdefault(name, set()).add(durations.suite_of(item))
    seconds: Counter[str] = Counter()
    for name, kinds in suites.items():
        seconds[_unit(name)] += sum(known[kind].get(name, limits[name]) for kind in kinds)
    counts = Counter(item.location[0] for item in items)
    items.sort(key=lambda item: (-seconds[_unit(item.location[0])], -counts[item.location[0]]))


def _unit(file: str) -> str:
    """What one process runs as a whole: a file, or the files that share launches."""
    return "worlds" if PurePosixPath(file).name in SHARING else file


class ByLaunch(LoadFileScheduling):  # type: ignore[misc]
    """Gives each process whole files as they are ordered here, and the files that share launches to one process."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return _unit(super()._split_scope(nodeid))

    def _reschedule(self, node: Any) -> None:
        """Hand out the next file as late as xdist can: before a process starts the last test of the one it has.

        A process whose file is a single test has to book the next one at once; the shortest is then booked, not the
        longest, which another process may be free for sooner.
        """
        if not node.shutting_down and self.workqueue:
            pending = [tests for tests in self.assigned_work[node].values() if not all(tests.values())]
            if self._pending_of(self.assigned_work[node]) > 1:
                return
            if pending and len(pending[0]) == 1:
                self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._reschedule(node)


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
    """Every process of pytest-xdist collects all tests; one of them reports what it left out."""
    if not _left_out:
        _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.section("left out of this run")
        for name, count in sorted(_left_out.items()):
            terminalreporter.line(f"{name}: {count}")
        terminalreporter.line(
            'run them with: pytest -m integration, pytest -m "exhaustive or not gpu" (all but gpu), pytest -m gpu'
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(_left_out)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _own_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads the user's own defaults or caches, or reaches a hub."""
    folder = tmp_path_factory.getbasetemp() / "home"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
