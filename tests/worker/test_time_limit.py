"""SageMaker's time limit: the job stops in order before it, and reports which limit that was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import job_environment, job_file, train_task

from sm_llm.spec.backends.sagemaker import SageMakerOptions
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.supervision.time_limit import start_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Timer:
    """A clock that stands still until the test advances it."""

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self.seconds, self.action = seconds, action
        self.started = self.daemon = False

    def start(self) -> None:
        self.started = True


def context(tmp_path: Path, **backend: Any) -> WorkerContext:
    job = job_file(train_task(), tmp_path / "run", 1)
    if backend:
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"backend": SageMakerOptions(**backend)})})
    return WorkerContext.read(job_environment(job))


def test_OB14_the_job_stops_by_itself_before_the_limit_and_reports_it(tmp_path: Path) -> None:
    found = context(tmp_path, max_run_seconds=3600)
    timers: list[Timer] = []

    def timer(seconds: float, action: Callable[[], None]) -> Any:
        timers.append(Timer(seconds, action))
        return timers[-1]

    with found.requests.deferred():
        start_time_limit(found, timer)
        (watch,) = timers
        assert (watch.seconds, watch.started, watch.daemon) == (3300.0, True, True)
        assert found.requests.reason is None
        watch.action()
    assert found.requests.reason == "the time limit of 3,600 s (backend.max_run_seconds), soon reached"
    assert found.requests.seconds_left(120) == pytest.approx(120, abs=5)


def test_OB14_without_a_limit_nothing_watches(tmp_path: Path) -> None:
    for found in (context(tmp_path), context(tmp_path, spot=False)):
        start_time_limit(found, lambda *_: pytest.fail("a timer"))


@pytest.mark.parametrize(("limit", "stop"), [(603, 452.85), (60, 30.0), (432_000, 431_280.0)])
def test_OB14_time_to_save_is_left_at_any_limit(limit: int, stop: float) -> None:
    assert SageMakerOptions(max_run_seconds=limit).seconds_until_stop == pytest.approx(stop)
