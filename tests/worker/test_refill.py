"""Trackers whose process was killed lack the last steps: the next attempt adds them from the event log, once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_trackers import Fake, WandbDouble, context_of, step, wandb  # noqa: F401 - wandb is a fixture
from worker_jobs import job_file, train_task

from sm_llm.runs.events import events as ev
from sm_llm.runs.events.events import EventWriter, read_events
from sm_llm.runs.run_paths import RunPaths
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.publishing.event_upload import upload_events
from sm_llm.worker.trackers.experiment_trackers import EventForwarder, earlier_events, forwarded_events


def attempt(root: Path, number: int, done: int, last: int, monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    """One attempt that continues after ``done`` steps and is fed until ``last``; equal steps have equal numbers."""
    with forwarded_events(context := context_of(root, monkeypatch, spec, attempt=number)):
        context.emit(ev.StartChosen("checkpoint" if done else "scratch", done))
        for at in range(done + 1, last + 1):
            context.emit(step(at, 5 - at / 100))
        context.emit(ev.Validation(last, 4.5, 90.0, 64))


def unfed(root: Path, number: int, *steps: int) -> None:
    """Steps in the log that no tracker has got: its process was killed."""
    log = EventWriter(RunPaths(root).event_file(number, "rank0"), number)
    for at in steps:
        log.write(step(at, 5 - at / 100))
    log.close()


def test_what_earlier_attempts_measured_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    unfed(root, 1, *range(1, 19))
    unfed(root, 2, *range(13, 16))
    context, fake = context_of(root, monkeypatch, {}, attempt=3), Fake()
    refilled: list[Any] = []
    monkeypatch.setattr(Fake, "refill", lambda self, events: refilled.extend(events), raising=False)
    feed = EventForwarder(context, {"a": lambda: fake}, poll_seconds=0.01)
    feed.start()
    for done in (14, 13):  # the second goes back within the attempt
        context.emit(ev.StartChosen("checkpoint", done))
        context.emit(step(done + 1, 1.0))
    feed.close(5)
    assert [event["step"] for event in refilled] == list(range(1, 15))
    assert [event["attempt"] for event in refilled] == [1] * 12 + [2] * 2
    assert [event["step"] for event in fake.events if event["kind"] == "step"] == [15, 14]
    assert earlier_events(context_of(root, monkeypatch, {}, attempt=1), 99) == []


def test_what_earlier_containers_measured_is_fetched_from_s3(bucket: str, s3_server: Any, tmp_path: Path) -> None:
    """A container begins with an empty disk."""
    store = S3Store(bucket, "runs/job-1", S3Options(endpoint_url=s3_server.endpoint))
    made = job_file(train_task(), Path("/job-1"), 1)
    access = made.spec.storage_options.model_copy(update={"endpoint_url": s3_server.endpoint})
    spec = made.spec.model_copy(update={"storage_options": access})
    for number, steps in ((1, range(1, 19)), (2, range(13, 16)), (3, ())):
        job = made.model_copy(update={"run_uri": store.uri, "spec": spec, "attempt": number})
        job.write(tmp_path / "job.json")
        environ = {"SM_LLM_JOB_FILE": str(tmp_path / "job.json"), "SAGEMAKER_BASE_DIR": str(tmp_path / str(number))}
        context = WorkerContext.read(environ)
        periodic = upload_events(context, environ)
        assert periodic is not None
        for at in steps:
            context.emit(step(at, 5.0))
        periodic.close()
        found = [(event["step"], event["attempt"]) for event in earlier_events(context, 14)]
        context.close()
    assert found == [(at, 1) for at in range(1, 13)] + [(13, 2), (14, 2)]


WANDB: dict[str, Any] = {"project": "p", "entity": "team"}


def test_D15_wandb_is_refilled_with_what_its_server_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: WandbDouble,  # noqa: F811
) -> None:
    root, spec = tmp_path / "run", {"wandb": WANDB}
    attempt(root, 1, 0, 12, monkeypatch, spec)
    unfed(root, 1, *range(13, 19))
    wandb.loses = lambda row: row["step"] in (11, 12) and "train/loss" in row
    attempt(root, 2, 18, 20, monkeypatch, spec)
    wandb.loses = lambda row: False
    assert [row["step"] for row in wandb.of("log") if "train/loss" in row] == [*range(1, 13), *range(11, 21)]
    assert [row["step"] for row in wandb.of("log") if "validation/loss" in row] == [12, 20]
    before = len(wandb.of("log"))
    attempt(root, 3, 20, 21, monkeypatch, spec)  # nothing is lacking
    assert [row["step"] for row in wandb.of("log")[before:]] == [21, 21]


@pytest.mark.parametrize("mode", ["offline", None])
def test_D15_wandb_states_where_it_cannot_be_refilled(
    mode: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wandb: WandbDouble,  # noqa: F811
) -> None:
    root, spec = tmp_path / "run", {"wandb": {**WANDB, "mode": mode}}
    wandb.answers = False
    attempt(root, 1, 0, 3, monkeypatch, spec)
    attempt(root, 2, 3, 4, monkeypatch, spec)
    (notice,) = [it["message"] for it in read_events(RunPaths(root).events) if it["kind"] == "notice"]
    assert notice.startswith("wandb may lack steps of earlier attempts")
    assert ("it is offline" if mode else "no answer") in notice
    assert [row["step"] for row in wandb.of("log") if "train/loss" in row] == [1, 2, 3, 4]


@pytest.mark.integration
def test_D15_tensorboard_is_refilled_and_shows_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files are read by name, which holds the second and a count of this process: attempts are seconds apart, not here.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))
    root, spec = tmp_path / "run", {"tensorboard": {}}

    def shown() -> tuple[list[int], list[int]]:
        found = EventAccumulator(str(root / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return [it.step for it in found.Scalars("train/loss")], [it.step for it in found.Scalars("validation/loss")]

    attempt(root, 1, 0, 12, monkeypatch, spec)
    unfed(root, 1, *range(13, 19))
    attempt(root, 2, 18, 20, monkeypatch, spec)
    assert shown() == ([*range(1, 21)], [12, 20])
    attempt(root, 3, 20, 22, monkeypatch, spec)  # nothing is lacking
    assert shown() == ([*range(1, 23)], [12, 20, 22])
    attempt(root, 4, 10, 11, monkeypatch, spec)  # goes back before what was lost
    assert shown() == ([*range(1, 12)], [11])
    shutil.rmtree(root / "tensorboard")
    attempt(root, 5, 11, 12, monkeypatch, spec)  # another machine, or a folder that was deleted
    assert shown() == ([*range(1, 13)], [11, 12])


@pytest.mark.integration
def test_D15_mlflow_is_refilled_and_holds_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    root, uri = tmp_path / "run", str(tmp_path / "mlruns")
    spec = {"mlflow": {"tracking_uri": uri, "experiment": "mine"}}
    attempt(root, 1, 0, 12, monkeypatch, spec)
    unfed(root, 1, *range(13, 19))
    attempt(root, 2, 18, 20, monkeypatch, spec)
    attempt(root, 3, 15, 21, monkeypatch, spec)  # takes 16 to 20 again, bit-equal
    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [it for it in client.search_experiments() if it.name == "mine"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(it.step for it in history) == list(range(1, 22))
