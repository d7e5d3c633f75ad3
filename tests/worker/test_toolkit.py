"""What the worker does about SageMaker's toolkit: its NCCL settings, interface filters, and how a job is found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from worker_jobs import events, job_environment, job_file, train_task

from sm_llm.contract.hosts import Hosts
from sm_llm.contract.job_file import JOB_ENVIRONMENT
from sm_llm.errors import RunFailed
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.worker.job_reader import read_job
from sm_llm.worker.main import main
from sm_llm.worker.process_info import ProcessInfo
from sm_llm.worker.supervision.toolkit import passing, settle_environment

if TYPE_CHECKING:
    from pathlib import Path

TOOLKIT = {"SM_TRAINING_ENV": "{}"}


def test_SF07_what_the_toolkit_forces_on_nccl_is_rolled_back() -> None:
    environ = {**TOOLKIT, "NCCL_PROTO": "simple", "RDMAV_FORK_SAFE": "1", "NCCL_IB_DISABLE": "1"}
    settle_environment(environ, {}, ["eth0"])
    assert environ == {**TOOLKIT, "NCCL_IB_DISABLE": "1"}


def test_the_jobs_own_variables_win_over_the_toolkit() -> None:
    environ = {**TOOLKIT, "NCCL_PROTO": "simple", "NCCL_DEBUG": "WARN"}
    settle_environment(environ, {"NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO"}, ["eth0"])
    assert (environ["NCCL_PROTO"], environ["NCCL_DEBUG"]) == ("Simple", "INFO")


def test_elsewhere_nothing_is_rolled_back() -> None:
    environ = {"NCCL_PROTO": "LL"}
    settle_environment(environ, {"X": "1"}, ["eth0"])
    assert environ == {"NCCL_PROTO": "LL"}


def test_DL04_a_filter_that_leaves_no_interface_is_an_error() -> None:
    with pytest.raises(RunFailed, match=r"NCCL_SOCKET_IFNAME=\^lo,docker,veth leaves no network interface.*veth12"):
        settle_environment({"NCCL_SOCKET_IFNAME": "^lo,docker,veth"}, {}, ["lo", "veth12"])
    settle_environment({"NCCL_SOCKET_IFNAME": "^lo,docker"}, {}, ["lo", "eth0"])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("eth", ["eth0", "eth1"]), ("=eth0", ["eth0"]), ("^=eth0", ["eth1", "lo"]), ("^eth,lo", []),
        ("lo,eth1", ["eth1", "lo"]),
    ],
)  # fmt: skip
def test_filters_are_read_as_nccl_reads_them(text: str, kept: list[str]) -> None:
    assert passing(text, ["eth0", "eth1", "lo"]) == kept


def test_the_job_is_found_in_its_channel(tmp_path: Path) -> None:
    container = ContainerPaths(tmp_path)
    with pytest.raises(RunFailed, match=r"mounts job\.json as channel 'job'"):
        read_job(container, [], {})
    job = job_file(train_task(), tmp_path / "run", 1)
    job.write(container.channel("job") / "job.json")
    assert read_job(container, [], {}) == (job, [])


def test_a_pipelines_run_and_a_tuning_trial_have_runs_of_their_own(tmp_path: Path) -> None:
    container = ContainerPaths(tmp_path)
    job_file(train_task(), tmp_path / "run", 1).write(container.channel("job") / "job.json")
    container.config.mkdir(parents=True)
    container.hyperparameters.write_text(json.dumps({"sm_llm_run": '"s3://bucket/p/train-1a2b"'}))
    job, _ = read_job(container, [], {})
    assert (job.run_uri, job.run_id) == ("s3://bucket/p/train-1a2b", "train-1a2b")
    container.hyperparameters.write_text(json.dumps({"_tuning_objective_metric": "loss"}))
    job, _ = read_job(container, [], {"TRAINING_JOB_NAME": "tune-007"})
    assert (job.run_uri, job.run_id) == (str(tmp_path / "run" / "trials" / "tune-007"), "tune-007")


def test_hyperparameters_change_a_training_and_are_reported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    environ = job_environment(job_file(train_task(), run, 1))
    container = ContainerPaths(run.parent / environ["SAGEMAKER_BASE_DIR"])
    container.config.mkdir(parents=True)
    container.hyperparameters.write_text(json.dumps({"task.max_steps": "4", "task.checkpoint.every_steps": "null"}))
    assert main("train", environ) == 0
    assert len(events(run, "step")) == 4
    assert "task.max_steps=4" in events(run, "notice")[0]["message"]


def test_an_unknown_hyperparameter_ends_the_job_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = job_environment(job_file(train_task(), tmp_path / "run", 1))
    assert JOB_ENVIRONMENT in environ
    assert main("train", environ, ["--train_batch_size", "4"]) == 1
    reported = capsys.readouterr().err
    assert "train_batch_size (hyperparameter): unknown key" in reported
    assert "Traceback" not in reported
    failure = ContainerPaths(tmp_path / environ["SAGEMAKER_BASE_DIR"]).failure.read_text()
    assert "train_batch_size" in failure


def test_hosts_without_torchrun_are_one_process_each() -> None:
    hosts = Hosts("algo-2", ("algo-1", "algo-2"))
    assert ProcessInfo.read({}, hosts) == ProcessInfo(rank=1, world_size=2, node=1, node_count=2)
    assert ProcessInfo.read({"WORLD_SIZE": "4", "RANK": "3"}, hosts).world_size == 4
