"""The end of a training: the result is exported beside the last save, and published once that one is safe."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import STEPS, events, job_environment, job_file, result_folder, train_task

from sm_llm.worker.checkpoint.save_writer import SaveJob, SaveWriter
from sm_llm.worker.main import main
from sm_llm.worker.runtime.stop import StopRequests
from sm_llm.worker.tasks import train

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.worker.publishing.publisher import Sealed

LIMIT = 120.0
"""Seconds that one side waits for the other before it gives up, and the test fails."""


@pytest.fixture
def exporting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the export begins; the last save is not written before."""
    begun, original = threading.Event(), SaveWriter._write_and_offer

    def write(self: SaveWriter, job: SaveJob) -> Sealed:
        assert job.save.step != STEPS or begun.wait(LIMIT), "the export waits for the last save"
        return original(self, job)

    monkeypatch.setattr(SaveWriter, "_write_and_offer", write)
    return begun


def exports(monkeypatch: pytest.MonkeyPatch, before: Any) -> None:
    original = train.export_result

    def export(*given: Any) -> Path:
        before()
        return original(*given)

    monkeypatch.setattr(train, "export_result", export)


def published(run: Path) -> list[int]:
    return [it["step"] for it in events(run, "checkpoint_published")]


def test_the_result_is_exported_while_the_last_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporting: threading.Event
) -> None:
    exports(monkeypatch, exporting.set)
    run = tmp_path / "run"
    assert main("train", job_environment(job_file(train_task(), run, 1))) == 0
    assert published(run)[-1] == STEPS
    (final,) = events(run, "final_published")
    assert final["time"] >= events(run, "checkpoint_published")[-1]["time"]
    assert (result_folder(run) / "model.safetensors").is_file()


def test_an_export_that_fails_leaves_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporting: threading.Event
) -> None:
    def fail() -> None:
        exporting.set()
        raise OSError("no space left on device")

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        exports(patch, fail)
        assert main("train", job_environment(job_file(train_task(), run, 1))) == 1
    assert published(run)[-1] == STEPS
    assert main("train", job_environment(job_file(train_task(), run, 1, attempt=2))) == 0
    assert events(run, "start_chosen")[-1]["step"] == STEPS, "no step is taken again"
    assert len(events(run, "final_published")) == 1


def test_a_stop_that_is_asked_for_beside_the_last_save_comes_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporting: threading.Event
) -> None:
    asked: list[StopRequests] = []
    ended: list[str] = []
    original = StopRequests.ask

    def ask(self: StopRequests, reason: str) -> None:
        asked.append(self)
        self._end_now = ended.append
        original(self, reason)

    monkeypatch.setattr(StopRequests, "ask", ask)
    trainers: list[train.Trainer] = []
    begin = train.Trainer.begin
    monkeypatch.setattr(train.Trainer, "begin", lambda self: (trainers.append(self), begin(self))[1])

    def stop() -> None:
        exporting.set()
        trainers[0].context.requests.ask("somebody")
        assert ended == [], "the last save is on its way"

    run = tmp_path / "run"
    exports(monkeypatch, stop)
    publish = train.Trainer.publish

    def publish_then(self: train.Trainer, folder: Path | None) -> None:
        assert published(run)[-1] == STEPS
        assert ended == ["somebody"]
        publish(self, folder)

    monkeypatch.setattr(train.Trainer, "publish", publish_then)
    assert main("train", job_environment(job_file(train_task(), run, 1))) == 0
    assert asked
