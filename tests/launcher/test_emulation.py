"""The SageMaker emulation: the request that SageMaker would get, under its real training toolkit, with data in S3."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from sm_llm.errors import StorageError
from sm_llm.launcher import api
from sm_llm.launcher.backends.sagemaker import emulation
from sm_llm.runs.run_paths import ContainerPaths
from sm_llm.runs.run_states import RunState

if TYPE_CHECKING:
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.preloaded import Preloaded
    from tests.fixtures.s3_server import S3Server

TRAIN: dict[str, Any] = {
    "kind": "train",
    "model": {
        "preset": "tiny",
        "config": {
            "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2,
        },
    },
    "data": {"format": "synthetic", "seq_length": 16, "rows": 64, "validation_rows": 8},
    "global_batch_size": 4,
    "max_steps": 8,
    "precision": {"compute": "fp32"},
    "checkpoint": {"every_steps": 4},
}  # fmt: skip
THREADS = {"threads_per_process": 1}


def spec(storage: str, nodes: int, processes: int, **task: Any) -> dict[str, Any]:
    return {
        "name": "rehearsed",
        "task": {**TRAIN, **task},
        "compute": {"instance_count": nodes, "processes_per_instance": processes},
        "storage": storage,
        "backend": {"name": "local", **THREADS},
    }


def losses(run: Run) -> dict[int, str]:
    return {row["step"]: float(row["loss"]).hex() for row in run.metrics()}


@pytest.fixture
def s3_storage(
    s3_server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, preloaded: Preloaded
) -> str:
    """Storage in S3; the toolkit, which knows nothing of our options, is configured by AWS's own variable."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"s3://{bucket}/runs"


def request(count: int = 2) -> dict[str, Any]:
    return {
        "TrainingJobName": "job",
        "ResourceConfig": {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": count},
        "HyperParameters": {"sagemaker_torch_distributed_enabled": "true", "task.max_steps": "5"},
        "Environment": {"X": "1"},
        "InputDataConfig": [
            {
                "ChannelName": "corpus",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "FOLDER"}},
                "InputMode": "FastFile",
            }
        ],
    }


def test_LM02_every_file_of_the_contract_is_laid_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.txt").write_text("x")
    sent = request()
    sent["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] = str(tmp_path / "data")
    emulation.lay_out(sent, tmp_path / "base", 1, 3, {})
    container = ContainerPaths(tmp_path / "base")
    resources = json.loads(container.resource_config.read_text())
    assert resources["hosts"] == ["127.0.0.1", "127.0.0.2"]
    assert resources["current_host"] == "127.0.0.2"
    assert resources["current_instance_type"] == "ml.p4d.24xlarge"
    assert json.loads(container.hyperparameters.read_text())["sagemaker_mpi_num_of_processes_per_host"] == "3"
    assert json.loads(container.input_data_config.read_text())["corpus"]["TrainingInputMode"] == "FastFile"
    assert (container.channel("corpus") / "x.txt").read_text() == "x"
    assert emulation.environment(sent, tmp_path / "base")["X"] == "1"


def test_the_bundle_of_a_relative_storage_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The toolkit looks for it from another folder."""
    monkeypatch.chdir(tmp_path)
    (submission,) = api.launch(spec("runs", 1, 1), "backend.contract=sagemaker", dry_run=True)
    code = json.loads(submission.request["training_job"]["HyperParameters"]["sagemaker_submit_directory"])
    assert code.startswith(f"{tmp_path}/runs/bundles/")


def test_groups_of_instances_keep_their_hosts(tmp_path: Path) -> None:
    sent = {**request(), "InputDataConfig": []}
    sent["ResourceConfig"] = {
        "InstanceGroups": [
            {"InstanceGroupName": "a", "InstanceType": "ml.p5.48xlarge", "InstanceCount": 2},
            {"InstanceGroupName": "b", "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 1},
        ]
    }
    emulation.lay_out(sent, tmp_path, 2, 1, {})
    found = json.loads(ContainerPaths(tmp_path).resource_config.read_text())
    assert (found["current_group_name"], found["current_instance_type"]) == ("b", "ml.p4d.24xlarge")
    assert [len(group["hosts"]) for group in found["instance_groups"]] == [2, 1]


def test_a_file_system_of_aws_cannot_be_emulated(tmp_path: Path) -> None:
    sent = request()
    sent["InputDataConfig"][0]["DataSource"] = {"FileSystemDataSource": {"FileSystemId": "fs-12345678"}}
    with pytest.raises(StorageError, match="fs-12345678"):
        emulation.lay_out(sent, tmp_path, 0, 1, {})


def test_a_dry_run_shows_the_request_that_would_be_emulated(tmp_path: Path) -> None:
    (submission,) = api.launch(spec(str(tmp_path), 2, 1), "backend.contract=sagemaker", dry_run=True)
    sent = submission.request["training_job"]
    assert sent["ResourceConfig"]["InstanceCount"] == 2
    assert sent["HyperParameters"]["sagemaker_program"] == '"train.py"'
    assert len(submission.request["nodes"]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nodes", "processes"), [(1, 2), (2, 1)], ids=["1-host", "2-hosts"])
def test_the_toolkit_trains_to_the_same_losses_as_the_local_backend(
    s3_storage: str, tmp_path: Path, nodes: int, processes: int
) -> None:
    here = api.launch(spec(str(tmp_path / "runs"), nodes, processes), wait=True)
    there = api.launch(spec(s3_storage, nodes, processes), "backend.contract=sagemaker", wait=True)
    assert there.state is RunState.COMPLETED
    assert len(losses(here)) == 8
    assert losses(there) == losses(here)
    assert str(there.result).startswith(s3_storage)
    log = "\n".join(there.logs())
    assert "Invoking TorchDistributed" in log
    assert "sagemaker-training-toolkit" in log
    assert any("Loss: " in line for line in there.logs(rank=0))
    assert not any("Loss: " in line for line in there.logs(rank=1))
    if processes > 1:  # torchrun tells the processes of a host apart
        assert not any("[rank" in line or "Invoking" in line for line in there.logs(rank=0))


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_SF07_term_to_the_toolkit_stops_the_training_in_order(s3_storage: str, preloaded: Preloaded) -> None:
    """The toolkit dies of it and passes it on to nobody; each node's watcher takes that for a request to stop."""
    preloaded.off()
    steady = {"schedule": "constant", "warmup_steps": 0}
    run = api.launch(spec(s3_storage, 2, 1, max_steps=4000, optim=steady), "backend.contract=sagemaker")
    try:
        _until(lambda: len(run.metrics()) > 4 and run.checkpoints())
        run.stop()
        _until(lambda: run.state.is_final)
    finally:
        if not run.state.is_final:
            run.stop(now=True)
    assert run.state is RunState.INTERRUPTED
    reason = run.attempts[-1].reason or ""
    assert "the end of the training toolkit" in reason
    # Whether the last save arrives before the toolkit kills the processes depends on the machine, its report does not.
    assert f"the checkpoint of step {run.checkpoints()[-1].step} is safe" in reason
    preloaded.on()
    again = run.resume(f"task.max_steps={run.checkpoints()[-1].step + 2}")
    assert again.wait() is RunState.COMPLETED


def _until(true: Any, seconds: float = 600.0) -> None:
    """Emulated jobs of several hosts take turns on a machine, also with those of another run of these tests."""
    import time

    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_the_cause_of_the_first_failing_rank_is_in_output_failure(s3_storage: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "x.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('boom on one')\n"
        "time.sleep(60)\n"
    )  # fmt: skip
    job = {**spec(s3_storage, 2, 1), "task": {"kind": "script", "entry": "x.py", "source": str(source)}}
    run = api.launch(job, "backend.contract=sagemaker")
    try:
        _until(lambda: run.state.is_final)
    finally:
        if not run.state.is_final:
            run.stop(now=True)
    assert run.state is RunState.FAILED
    assert (run.attempts[-1].rank, "ValueError: boom on one" in (run.attempts[-1].reason or "")) == (1, True)
    notes = [ContainerPaths(run.paths.node_dir(1, node)).failure.read_text() for node in range(2)]
    assert notes[1].startswith("rank 1: ValueError: boom on one (x.py ended with exit code 1)")
    assert all("boom on one" in note for note in notes)


@pytest.mark.integration
@pytest.mark.timeout(900)
def test_a_script_job_runs_from_the_bundle_with_byte_equal_arguments(s3_storage: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "x.sh").write_text('printf "%s\\0" "$@" > "$SM_LLM_OUTPUT/argv-$(hostname >/dev/null; echo $#)"\n')
    args = ["a b", "it's", '"q"', "$HOME", "line\nbreak", "*", ""]
    job = {**spec(s3_storage, 2, 1), "task": {"kind": "script", "entry": "x.sh", "source": str(source), "args": args}}
    run = api.launch(job, "backend.contract=sagemaker", wait=True)
    target = tmp_path / "result"
    api_sync(str(run.result), target)
    assert (target / "argv-7").read_bytes() == b"".join(arg.encode() + b"\0" for arg in args)


def api_sync(source: str, target: Path) -> None:
    from sm_llm.launcher.tools.sync_command import sync

    sync(source, target)
