"""The worker's frame: entrypoints, staging, reported failures, the prepare task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.contract.job_file import entrypoint_source
from sm_llm.errors import StorageError
from sm_llm.runs.run_paths import ContainerPaths, RunPaths
from sm_llm.runs.run_states import EXIT_CODES, RunState
from sm_llm.runs.stopped import StopRecord
from sm_llm.spec.tasks import TASK_KINDS, PrepareTask, TrainTask
from sm_llm.storage.publication.publish import find_final
from sm_llm.storage.uri import open_store
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.inputs.stage_inputs import stage, stage_inputs
from sm_llm.worker.main import main
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.runtime.stop import Stopping
from sm_llm.worker.tasks import prepare

REPOSITORY = Path(__file__).parents[2]
PREPARE = {"kind": "prepare", "seq_length": 16, "train_tokenizer": {"vocab_size": 300}}


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_entrypoints_are_what_the_template_states(kind: str) -> None:
    text = (REPOSITORY / "entrypoints" / f"{kind}.py").read_text()
    assert text == entrypoint_source(kind)
    assert 'if __name__ == "__main__":' in text


def test_an_unknown_kind_has_no_entrypoint() -> None:
    with pytest.raises(ValueError, match="no task kind"):
        entrypoint_source("dance")


def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"document {number} says hello to the world, over and over again. " * 5)
    return folder


def prepare_context(tmp_path: Path, source: str) -> tuple[dict[str, str], Path]:
    run = tmp_path / "prepared"
    return job_environment(job_file({**PREPARE, "sources": [source]}, run, 1)), run


def test_prepare_publishes_rows_tokenizer_and_account(tmp_path: Path) -> None:
    environ, run = prepare_context(tmp_path, str(text_folder(tmp_path)))
    assert main("prepare", environ) == 0
    commit = find_final(open_store(run), run_id="prepared")
    assert commit is not None
    paths = {entry.path.split("/")[0] for entry in commit.files}
    assert {"train", "tokenizer", "account.json"} <= paths
    assert len(events(run, "account")) == 1
    assert main("prepare", environ) == 0
    (reported,) = events(run, "nothing_done")
    assert "published already; there is nothing to do" in reported["reason"]
    assert reported["uri"] == str(run / "final" / commit.save_id / "data")


def as_job(environ: dict[str, str], name: str) -> dict[str, str]:
    """The environment of a training job that no launcher started: a pipeline's."""
    return {**environ, "TRAINING_JOB_NAME": name, "SAGEMAKER_REGION": "us-west-2"}


def test_f01_another_job_of_a_pipeline_begins_anew_where_a_result_is_published(tmp_path: Path) -> None:
    texts = text_folder(tmp_path)
    environ, run = prepare_context(tmp_path, str(texts))
    assert main("prepare", as_job(environ, "pipelines-a-prepare-1")) == 0
    first = find_final(open_store(run), run_id="prepared")
    assert first is not None
    (texts / "20.txt").write_text("a new document under the same prefix, which counts. " * 5)
    assert main("prepare", as_job(environ, "pipelines-b-prepare-2")) == 0
    second = find_final(open_store(run), run_id="prepared")
    assert second is not None
    assert second.save_id != first.save_id
    used = [it["account"]["documents"]["used"] for it in events(run, "account")]
    assert used == [20, 21]
    assert "This run starts from step 0" in events(run, "notice")[-1]["message"]
    assert (run / "ckpt/retired/pipelines-a-prepare-1/final.json").is_file()
    assert events(run, "nothing_done") == []
    assert main("prepare", as_job(environ, "pipelines-b-prepare-2")) == 0, "the platform started it again"
    assert len(events(run, "nothing_done")) == 1


def test_A1_the_result_of_another_specification_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ, run = prepare_context(tmp_path, str(text_folder(tmp_path)))
    assert main("prepare", environ) == 0
    job = job_file({**PREPARE, "sources": ["elsewhere"]}, run, 1).model_copy(update={"spec_digest": "another"})
    assert main("prepare", job_environment(job)) == 1
    assert "is the result of another specification (digest, this job has another)" in capsys.readouterr().err


def test_only_one_process_prepares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    run = tmp_path / "prepared"
    environ = job_environment(job_file({**PREPARE, "sources": [str(text_folder(tmp_path))]}, run, 2))
    other = {**environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert main("prepare", other) == 0
    assert not (run / "final").exists()


def failure(environ: dict[str, str]) -> str:
    return ContainerPaths(Path(environ["SAGEMAKER_BASE_DIR"])).failure.read_text()


def test_a_fault_of_the_user_is_reported_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ, _ = prepare_context(tmp_path, str(tmp_path / "nowhere"))
    assert main("prepare", environ) == 1
    reported = capsys.readouterr().err
    assert "nowhere" in reported
    assert "Traceback" not in reported
    assert failure(environ).startswith("rank 0: ")


def test_our_own_mistake_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, _ = prepare_context(tmp_path, str(text_folder(tmp_path)))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("sm_llm.worker.tasks.prepare.prepare", broken)
    assert main("prepare", environ) == 1
    assert "Traceback" in failure(environ)
    assert "ZeroDivisionError: ours" in failure(environ)


def test_a_stop_is_recorded_before_anything_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, _ = prepare_context(tmp_path, str(text_folder(tmp_path)))
    record, seen = StopRecord(reason="SIGTERM to rank 0", step=3), []

    def stop(*_: object) -> None:
        raise Stopping(record)

    def close(_: WorkerContext) -> None:
        seen.append(StopRecord.read(ContainerPaths(Path(environ["SAGEMAKER_BASE_DIR"])).stopped))

    monkeypatch.setattr(prepare, "run", stop)
    monkeypatch.setattr(WorkerContext, "close", close)
    assert main("prepare", environ) == EXIT_CODES[RunState.STOPPED]
    assert seen == [record]


def test_the_first_failing_process_of_a_node_is_the_one_that_is_reported(tmp_path: Path) -> None:
    environ, _ = prepare_context(tmp_path, str(tmp_path / "nowhere"))
    main("prepare", environ)
    first = failure(environ)
    main("train", environ)
    assert failure(environ) == first


def test_an_entrypoint_refuses_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ, _ = prepare_context(tmp_path, str(text_folder(tmp_path)))
    assert main("train", environ) == 1
    assert "holds a prepare job" in capsys.readouterr().err


def test_DL10_observed_world_size_is_compared_with_the_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = job_environment(job_file(train_task(), tmp_path / "run", 4))
    assert main("train", environ) == 1
    reported = capsys.readouterr().err
    assert "started as 1 process" in reported
    assert "asks for 4" in reported


def context_of(tmp_path: Path, task: dict[str, Any], process: ProcessInfo, channels: dict[str, str]) -> WorkerContext:
    run = tmp_path / "run"
    job = job_file(task, run, 2).model_copy(update={"channels": channels})
    return WorkerContext(job, process, ContainerPaths(tmp_path / "node"), RunPaths(run))


LEADER = ProcessInfo(0, 2, 0, 2)
FOLLOWER = ProcessInfo(1, 2, 1, 2)


def test_plain_paths_are_read_where_they_lie_and_channels_where_they_are_mounted(tmp_path: Path) -> None:
    task = train_task(data={"format": "rows", "seq_length": 32, "train": "/data/a", "validation": "/data/b"})
    found = stage_inputs(context_of(tmp_path, task, LEADER, {"data_train": "/data/a"})).task
    assert isinstance(found, TrainTask)
    assert found.data.train == str(tmp_path / "node" / "input" / "data" / "data_train")  # type: ignore[union-attr]
    assert found.data.validation == "/data/b"  # type: ignore[union-attr]


def test_a_uri_is_copied_once_per_node_and_verified(tmp_path: Path) -> None:
    source = text_folder(tmp_path)
    task = {**PREPARE, "sources": [source.as_uri(), "builtin:python-docs"]}
    job = stage_inputs(context_of(tmp_path, task, LEADER, {})).task
    assert isinstance(job, PrepareTask)
    copied = Path(job.sources[0])
    assert copied.is_relative_to(tmp_path / "node" / "scratch")
    assert {path.name for path in copied.iterdir()} == {path.name for path in source.iterdir()}
    assert job.sources[1] == "builtin:python-docs"
    assert stage_inputs(context_of(tmp_path, task, FOLLOWER, {})).task == job


def test_a_single_file_is_staged_under_its_name(tmp_path: Path) -> None:
    source = text_folder(tmp_path) / "3.txt"
    staged = stage(context_of(tmp_path, train_task(), LEADER, {}), source.as_uri())
    assert staged.name == "3.txt"
    assert staged.read_text() == source.read_text()


def test_nobody_waits_for_a_copy_that_failed(tmp_path: Path) -> None:
    uri = (tmp_path / "nowhere").as_uri()
    with pytest.raises(StorageError):
        stage(context_of(tmp_path, train_task(), LEADER, {}), uri)
    with pytest.raises(StorageError, match="failed in the node's first process"):
        stage(context_of(tmp_path, train_task(), FOLLOWER, {}), uri)


def test_waiting_for_the_first_process_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="has not finished copying"):
        stage(context_of(tmp_path, train_task(), FOLLOWER, {}), tmp_path.as_uri(), wait_seconds=0.1)
