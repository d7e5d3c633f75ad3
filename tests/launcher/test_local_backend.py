"""The local backend's submissions, and the container contract they are laid out in."""

from __future__ import annotations

import json
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sm_llm.contract.job_file import JobFile, channel_name, entrypoint_source
from sm_llm.errors import PlanError
from sm_llm.launcher.backends.local.backend import LocalBackend, Machine, this_machine
from sm_llm.launcher.backends.local.container import PORT, clear_scratch, lay_out
from sm_llm.launcher.backends.local.processes import reserved_port
from sm_llm.launcher.build_submission import build_submission
from sm_llm.launcher.job_inputs import absolute_inputs
from sm_llm.launcher.planner import plan
from sm_llm.runs.run_paths import RunPaths, generate_run_id
from sm_llm.spec.job import JobSpec
from tests.launcher.conftest import SYNTHETIC

if TYPE_CHECKING:
    from sm_llm.launcher.backend import Submission
    from sm_llm.launcher.planning.plan import Plan

JOB = {
    "name": "job",
    "compute": {"instance_count": 2, "processes_per_instance": 2},
    "environment": {"MY_FLAG": "on"},
    "task": {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 64},
        "max_steps": 4,
        "micro_batch_size": 1,
    },
}


def job_file(root: Path, channels: dict[str, str] | None = None) -> tuple[Plan, JobFile]:
    (it,) = plan(JOB)
    return it, JobFile(
        run_id="job-1", attempt=3, run_uri=str(root), spec=it.job, spec_digest=it.digest, channels=channels or {}
    )


def rendered(it: Plan, job: JobFile, machine: Machine) -> Submission:
    """What another machine would be sent."""
    backend = LocalBackend(machine)
    return backend.render(replace(it, target=backend.plan_checks(it).target), job)


def test_the_submission_is_exactly_what_runs_on_every_node(tmp_path: Path) -> None:
    it, job = job_file(tmp_path / "run")
    submission = rendered(it, job, Machine(cpus=8))
    first, second = submission.request["nodes"]
    assert first["argv"][1:] == [
        "-P", "-m", "sm_llm.worker.loopback", "torch.distributed.run",
        "--nnodes=2", "--nproc-per-node=2", "--node-rank=0", "--rdzv-backend=static",
        "--rdzv-id=job-1-3", "--master-addr=127.0.0.1", f"--master-port={PORT}", "--local-addr=127.0.0.1",
        "--max-restarts=0", f"--log-dir={tmp_path / 'run/local/attempt-3/node-0/scratch/torchrun'}", "--tee=3",
        str(tmp_path / "run/local/attempt-3/node-0/code/train.py"),
    ]  # fmt: skip
    assert "--node-rank=1" in second["argv"]
    assert submission.request["entrypoint"] == entrypoint_source("train")
    assert first["env"]["OMP_NUM_THREADS"] == "2", "8 cores, 4 processes"
    assert first["env"]["MY_FLAG"] == "on"
    assert first["env"]["SM_LLM_JOB_FILE"] == str(tmp_path / "run/job.json")
    assert "CUDA_VISIBLE_DEVICES" not in first["env"]
    json.dumps(submission.request)
    assert not (tmp_path / "run").exists(), "rendering touches nothing"


def test_a_run_of_one_process_leaves_nothing_of_torchruns_in_the_temporary_folder(tmp_path: Path) -> None:
    (it,) = plan({**JOB, "compute": {"processes_per_instance": 1}})
    job = JobFile(run_id="job-1", attempt=1, run_uri=str(tmp_path), spec=it.job, spec_digest=it.digest, channels={})
    (node,) = rendered(it, job, Machine(cpus=8)).request["nodes"]
    assert f"--log-dir={tmp_path / 'local/attempt-1/node-0/scratch/torchrun'}" in node["argv"]
    assert "--tee=3" not in node["argv"]


def test_every_node_gets_gpus_of_its_own(tmp_path: Path) -> None:
    it, job = job_file(tmp_path)
    nodes = rendered(it, job, Machine(8, ("0", "1", "2", "3"))).request["nodes"]
    assert [node["env"]["CUDA_VISIBLE_DEVICES"] for node in nodes] == ["0,1", "2,3"]
    assert [node["env"]["SM_NUM_GPUS"] for node in nodes] == ["2", "2"]


def test_the_machine_is_read_without_loading_cuda(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert this_machine({}, tmp_path).gpus == ("0", "1")
    assert this_machine({"CUDA_VISIBLE_DEVICES": "1, GPU-ab"}, tmp_path).gpus == ("1", "GPU-ab")
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""}, tmp_path).gpus == ()
    assert this_machine({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path).gpus == ()


def test_LM02_all_contract_files_are_there_for_every_fake_host(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a.arrow").write_text("x")
    it, job = job_file(tmp_path / "run", {"data_train": str(rows)})
    paths = RunPaths(tmp_path / "run")
    nodes = rendered(it, job, Machine(2)).request["nodes"]
    for node in range(2):
        container = lay_out(paths, job, node, "print()")
        config = json.loads(container.resource_config.read_text())
        assert config["hosts"] == ["algo-1", "algo-2"]
        assert config["current_host"] == f"algo-{node + 1}"
        assert config["network_interface_name"]
        assert json.loads(container.hyperparameters.read_text()) == {}
        assert json.loads(container.input_data_config.read_text())["data_train"]["TrainingInputMode"] == "File"
        assert (container.channel("data_train") / "a.arrow").read_text() == "x"
        env = nodes[node]["env"]
        assert env["SAGEMAKER_BASE_DIR"] == str(container.base)
        assert env["SM_CURRENT_HOST"] == f"algo-{node + 1}"
        assert json.loads(env["SM_HOSTS"]) == ["algo-1", "algo-2"]
        assert json.loads(env["SM_CHANNELS"]) == ["data_train"]
        for name in ("SM_MODEL_DIR", "SM_OUTPUT_DIR", "SM_OUTPUT_DATA_DIR", "SM_INPUT_DIR", "SM_INPUT_CONFIG_DIR",
                     "SM_MODULE_DIR", "SM_CHANNEL_DATA_TRAIN"):  # fmt: skip
            assert Path(env[name]).is_dir(), name
        assert (container.code / env["SM_USER_ENTRY_POINT"]).read_text() == "print()"
        assert container.scratch.is_dir()
    clear_scratch(paths, job.attempt)
    assert not list(paths.root.rglob("scratch"))
    assert (rows / "a.arrow").exists(), "links are not followed when cleaning"


def test_laying_out_again_replaces_what_an_earlier_try_left(tmp_path: Path) -> None:
    _, job = job_file(tmp_path)
    container = lay_out(RunPaths(tmp_path), job, 0, "one")
    container.failure.write_text("old")
    assert not lay_out(RunPaths(tmp_path), job, 0, "two").failure.exists()


def test_local_inputs_become_absolute_paths_and_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "model", "old"):
        (tmp_path / name).mkdir()
    task = {
        "kind": "train",
        "model": {"path": "model"},
        "tokenizer": "org/on-the-hub",
        "data": {"format": "rows", "train": "rows", "seq_length": 8},
        "max_steps": 1,
        "start": {"checkpoint": "old@12"},
    }
    job, channels = absolute_inputs(JobSpec.model_validate({"name": "job", "task": task}))
    found = job.task.model_dump()
    assert found["model"]["path"] == str(tmp_path / "model")
    assert found["data"]["train"] == str(tmp_path / "rows")
    assert found["start"]["checkpoint"] == f"{tmp_path / 'old'}@12"
    assert found["tokenizer"] == "org/on-the-hub"
    assert channels["data_train"] == str(tmp_path / "rows")
    assert channels["model_path"] == str(tmp_path / "model")
    assert "tokenizer" not in channels


def test_staging_numbers_the_next_attempt_and_keeps_the_records_digest(tmp_path: Path) -> None:
    from sm_llm.launcher.build_submission import new_record
    from sm_llm.runs.run_record import Attempt
    from sm_llm.runs.run_store import FolderRunStore

    (it,) = plan(JOB)
    record = new_record("job-1", it.job, "digest", {}, [], created=1.0)
    record = record.with_attempt(Attempt(number=1, native_id="1", started=1.0))
    job = build_submission(it, FolderRunStore(tmp_path), record).job
    assert (job.run_id, job.attempt, job.spec_digest, job.run_uri) == ("job-1", 2, "digest", str(tmp_path))


@pytest.mark.parametrize(("asked", "is_kept"), [("true", True), ("false", False)])
def test_a_user_may_keep_the_git_diff_out_of_records(
    asked: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sm_llm.launcher.build_submission import new_record

    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"]):
        (tmp_path / "train.py").write_text("rate = 1\n")
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text("rate = 2\n")
    monkeypatch.setenv("SM_LLM_RECORD_GIT_DIFF", asked)
    (it,) = plan(JOB)
    found = new_record("job-1", it.job, "digest", {}, [], created=1.0, folder=tmp_path).git
    assert found is not None
    assert ("+rate = 2" in found.diff) is is_kept
    assert bool(found.diff) is is_kept


def test_channel_names() -> None:
    assert channel_name("task.data.train") == "data_train"
    assert channel_name("task.sources.0") == "sources_0"


def test_run_ids_sort_by_time_and_differ_within_a_second() -> None:
    assert generate_run_id("job", 0.0, "beef") == "job-19700101-000000-beef"
    assert len({generate_run_id("job", 0.0) for _ in range(20)}) > 15


def test_a_reserved_port_is_given_to_nobody_else_but_can_be_served() -> None:
    with reserved_port() as port, reserved_port() as other:
        assert port != other
        for _ in range(200):
            with socket.socket() as chance:
                chance.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                chance.bind(("127.0.0.1", 0))
                assert chance.getsockname()[1] not in (port, other)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", port))
            server.listen()


def test_a_program_that_is_not_there_is_reported_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    for source, entry, path in (
        (tmp_path / "nowhere", "train.py", "task.source"),
        (tmp_path / "train.py", "train.py", "task.source"),
        (tmp_path, "trian.py", "task.entry"),
    ):
        with pytest.raises(PlanError) as caught:
            plan({"name": "own", "task": {"kind": "script", "entry": entry, "source": str(source)}})
        assert [fault.path for fault in caught.value.issues] == [path]
    assert plan({"name": "own", "task": {"kind": "script", "entry": "-m train", "source": str(tmp_path)}})


def test_a_emulation_has_the_channels_of_sagemaker() -> None:
    task = {**JOB["task"], "data": {"format": "rows", "train": "inputs.job", "seq_length": 64}}
    with pytest.raises(PlanError, match=r"inputs.job .*is the name of the channel"):
        plan({**JOB, "task": task}, inputs={"job": "s3://bucket/x"}, backend={"contract": "sagemaker"})


def test_12f_devices_that_are_not_here_and_too_many_processes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = {**SYNTHETIC, "environment": {"CUDA_VISIBLE_DEVICES": "3"}, "compute": {"processes_per_instance": 64}}
    (made,) = plan(spec)

    def codes(machine: Machine) -> set[str]:
        return {it.code for it in LocalBackend(machine).plan_checks(made).issues}

    assert {"gpu-choice-without-gpu", "processes-exceed-cores"} <= codes(Machine(2))
    assert "processes-exceed-cores" not in codes(Machine(32))
    assert not {"gpu-choice-without-gpu", "processes-exceed-cores"} & codes(Machine(2, ("0", "1", "2", "3")))
