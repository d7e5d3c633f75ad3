"""A step of a pipeline has a run that is found like any other, though no launcher wrote its record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker_jobs import job_environment, job_file

from sm_llm.contract.job_file import RUN_FOLDER_ENVIRONMENT
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_record import RunRecord
from sm_llm.runs.run_states import RunState
from sm_llm.worker.context import WorkerContext
from sm_llm.worker.publishing.own_record import keep_record

if TYPE_CHECKING:
    from pathlib import Path

TASK = {"kind": "script", "entry": "train.py"}


def keep(tmp_path: Path, name: str, **environ: str) -> None:
    variables = {"TRAINING_JOB_NAME": name, "SAGEMAKER_REGION": "us-west-2", **environ}
    context = WorkerContext.read({**job_environment(job_file(TASK, tmp_path / "run", 1)), **variables})
    keep_record(context, variables)
    context.close()


def record(tmp_path: Path) -> RunRecord:
    return RunRecord.read(RunPaths(tmp_path / "run").record)


def test_the_first_job_writes_the_record_and_a_later_one_takes_its_place(tmp_path: Path) -> None:
    keep(tmp_path, "pipelines-x-train-1")
    first = record(tmp_path)
    assert (first.run_id, first.spec["task"]["entry"]) == ("run", "train.py")
    assert [it.native_id for it in first.attempts] == ["us-west-2/pipelines-x-train-1"]
    stop_file = RunPaths(tmp_path / "run").stop_file
    stop_file.write_text("1\n")
    keep(tmp_path, "pipelines-x-train-1")
    assert record(tmp_path) == first
    assert stop_file.exists()
    path = RunPaths(tmp_path / "run").record
    lost = first.attempts[0].model_copy(update={"state": RunState.STOPPED, "reason": "never created"})
    RunRecord.update(path, lambda held: held.with_attempt(lost))
    keep(tmp_path, "pipelines-x-train-1")
    assert record(tmp_path).attempts[0].state is None, "it lives"
    stop_file.write_text("1\n")
    keep(tmp_path, "pipelines-x-train-2")
    assert not stop_file.exists(), "it asked the first job"
    assert [it.native_id for it in record(tmp_path).attempts] == ["us-west-2/pipelines-x-train-2"]


def test_a_launcher_writes_the_record_of_what_it_starts(tmp_path: Path) -> None:
    keep(tmp_path, "job", **{RUN_FOLDER_ENVIRONMENT: str(tmp_path / "run")})
    assert not RunPaths(tmp_path / "run").record.exists()


def test_outside_a_training_job_nothing_is_written(tmp_path: Path) -> None:
    keep(tmp_path, "")
    assert not RunPaths(tmp_path / "run").record.exists()
