"""What is reported of a node's compiler, and when it counts as stalled; the clock is the test's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.errors import RunFailed
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.supervision.compile_progress import REPORT_SECONDS, CompileProgress

if TYPE_CHECKING:
    from pathlib import Path

STALL = 3600.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def graph(cache: Path, name: str, *files: str) -> None:
    module = cache / "neuronxcc-2.23.6484.0+3b612583" / name
    module.mkdir(parents=True, exist_ok=True)
    for file in ("model.hlo_module.pb", *files):
        (module / file).write_text("x")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(tmp_path: Path, clock: Clock) -> CompileProgress:
    context = WorkerContext.read(job_environment(job_file(train_task(), tmp_path / "run", 1)))
    (tmp_path / "cache").mkdir()
    return CompileProgress(context, tmp_path / "cache", STALL, clock)


def after(progress: CompileProgress, clock: Clock, seconds: float) -> None:
    clock.now += seconds
    progress.poll()


def test_graphs_are_reported_each_minute_and_what_is_missing_is_named(
    progress: CompileProgress, clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress.poll()
    graph(tmp_path / "cache", "MODULE_1+aa", "model.neff", "model.done")
    graph(tmp_path / "cache", "MODULE_2+aa")
    after(progress, clock, REPORT_SECONDS / 2)
    after(progress, clock, REPORT_SECONDS / 2)
    found = [(it["done"], it["total"], it["detail"]) for it in events(tmp_path / "run", "progress")]
    assert found == [(0, 0, "node 0: 0 of 0"), (1, 2, "node 0: 1 of 2")]
    after(progress, clock, 10 * 60)
    assert "graphs: 1 of 2 compiled (node 0: 1 of 2), nothing new on node 0 for 10 min" in capsys.readouterr().out


def test_every_graph_that_changes_puts_the_stall_off(progress: CompileProgress, clock: Clock, tmp_path: Path) -> None:
    progress.poll()
    for files in ((), ("model.neff",), ("model.neff", "model.done")):
        graph(tmp_path / "cache", "MODULE_1+aa", *files)
        after(progress, clock, STALL)
    graph(tmp_path / "cache", "MODULE_2+aa", "model.log")
    after(progress, clock, STALL)
    after(progress, clock, STALL)
    graph(tmp_path / "cache", "MODULE_3+aa")
    after(progress, clock, 1.0 + STALL)
    with pytest.raises(RunFailed, match=r"on node 0 stalled: .*3601 s, 1 graph not compiled \(MODULE_3\+aa\)\. Raise"):
        after(progress, clock, 1.0 + STALL)


def test_a_program_without_any_graph_is_a_stall(progress: CompileProgress, clock: Clock) -> None:
    after(progress, clock, STALL)
    with pytest.raises(RunFailed, match=r"no graph extracted.*Raise task\.stall_seconds"):
        after(progress, clock, 10.0)
