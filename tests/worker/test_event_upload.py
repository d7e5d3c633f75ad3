"""A worker in a container of its own brings its events to S3, continues a log that is there, and can be stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from worker_jobs import job_file, train_task

from sm_llm.contract.job_file import JOB_ENVIRONMENT, RUN_FOLDER_ENVIRONMENT, JobFile
from sm_llm.runs.events.events import Notice, read_events
from sm_llm.runs.replication.s3_cache import S3Cache
from sm_llm.runs.stop_request import ask_to_stop
from sm_llm.storage.s3.s3_options import S3Options
from sm_llm.storage.s3_store import S3Store
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.publishing.event_upload import upload_events

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def store(bucket: str, s3_server: Any) -> S3Store:
    return S3Store(bucket, "runs/job-1", S3Options(endpoint_url=s3_server.endpoint))


@pytest.fixture
def container(store: S3Store, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The environment of one process of a job of two nodes, in a fresh container called ``name``."""
    made = job_file(train_task(), Path("/job-1"), 2)
    access = made.spec.storage_options.model_copy(update={"endpoint_url": store.options.endpoint_url})
    spec = made.spec.model_copy(update={"storage_options": access})
    job: JobFile = made.model_copy(update={"run_uri": store.uri, "spec": spec})
    job.write(tmp_path / "job.json")

    def environment(name: str, node: int = 0) -> dict[str, str]:
        rank = {"RANK": str(node), "WORLD_SIZE": "2", "GROUP_RANK": str(node), "GROUP_WORLD_SIZE": "2"}
        base = str(tmp_path / name)
        return {JOB_ENVIRONMENT: str(tmp_path / "job.json"), "SAGEMAKER_BASE_DIR": base, **rank}

    return environment


def reported(store: S3Store, folder: Path) -> list[str]:
    S3Cache(folder, store).refresh("events/", lambda name: True)
    return [event["message"] for event in read_events(folder / "events")]


def test_a_node_ships_its_own_events_and_a_fresh_container_continues_with_them(
    store: S3Store, container: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    for name in ("first", "second"):  # the second takes the place of the first, with an empty disk
        environ = container(name)
        context = WorkerContext.read(environ)
        periodic = upload_events(context, environ)
        assert periodic is not None
        context.emit(Notice(name))
        periodic.close()
        context.close()
    assert reported(store, tmp_path / "seen") == ["first", "second"]
    other = WorkerContext.read(container("other", node=1))
    assert list((other.run.root / "events").glob("*")) == [], "what other nodes have told is theirs"


def test_a_launcher_on_this_machine_ships_what_its_workers_write(
    container: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    environ = {**container("node"), RUN_FOLDER_ENVIRONMENT: str(tmp_path / "workspace")}
    context = WorkerContext.read(environ)
    context.emit(Notice("here"))
    assert upload_events(context, environ) is None
    assert [event["message"] for event in read_events(tmp_path / "workspace" / "events")] == ["here"]


def test_a_request_in_S3_becomes_a_stop_file_on_the_first_node(
    store: S3Store, container: Callable[..., dict[str, str]]
) -> None:
    environ = container("node")
    context = WorkerContext.read(environ)
    periodic = upload_events(context, environ)
    assert periodic is not None
    ask_to_stop(store, 1)
    deadline = time.monotonic() + 120
    while not context.run.stop_file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    periodic.close()


def test_a_store_that_is_down_is_reported_once_and_never_raised(
    container: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = container("node")
    context = WorkerContext.read(environ)
    access = context.job.spec.storage_options.model_copy(update={"endpoint_url": "http://127.0.0.1:9"})
    context.job = context.job.model_copy(
        update={"spec": context.job.spec.model_copy(update={"storage_options": access})}
    )
    monkeypatch.setattr("sm_llm.runs.s3_run_store.CONFIG", {"connect_timeout": 1, "retries": {"total_max_attempts": 1}})
    periodic = upload_events(context, environ)
    assert periodic is not None
    context.emit(Notice("training goes on"))
    periodic.close(2.0)
    messages = [event["message"] for event in read_events(context.run.events)]
    assert messages[0] == "training goes on"
    assert [it for it in messages[1:] if "does not take events and logs" in it] == messages[1:2]


def test_what_a_thread_reports_after_the_event_log_is_closed_is_printed_alone(
    container: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    context = WorkerContext.read(container("late"))
    context.notice("first")
    context.close()
    context.notice("no storage", "warning")
    assert capsys.readouterr().out.endswith("warning: no storage\n")
    assert [it["message"] for it in read_events(context.run.events)] == ["first"]
