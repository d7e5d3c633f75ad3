"""Training jobs from launch to their end: boto3 against a contract double of SageMaker, runs in a real S3 store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from sm_llm.contract.failure import Cause
from sm_llm.errors import PlanError, SmLlmError, SubmitError
from sm_llm.launcher.api import launch
from sm_llm.launcher.aws_account import account
from sm_llm.launcher.backend import NativeState
from sm_llm.launcher.backends.sagemaker.jobs import jobs
from sm_llm.launcher.display.tables import status_table
from sm_llm.launcher.find_runs import attach
from sm_llm.runs.events.events import EventWriter, FirstStep
from sm_llm.runs.events.failures import Failed
from sm_llm.runs.replication.log_uploader import LogUploader
from sm_llm.runs.run_paths import RunPaths
from sm_llm.runs.run_states import RunState
from sm_llm.runs.s3_run_store import S3RunStore
from sm_llm.spec.parallelism.nxd import NxdSpec
from sm_llm.storage.publication.publish import new_save, publish, seal
from sm_llm.storage.uri import open_store
from tests.fixtures.sagemaker_double import Refusal
from tests.launcher.sagemaker.conftest import TINY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sm_llm.launcher.run import Run
    from tests.fixtures.s3_server import S3Server
    from tests.fixtures.sagemaker_double import SageMakerDouble

pytestmark = pytest.mark.integration


@pytest.fixture
def start(bucket: str, s3_server: S3Server, sagemaker_double: SageMakerDouble) -> Callable[..., Run]:
    """Launch a tiny job whose run lies in the bucket."""

    def started(*overrides: str, **fields: Any) -> Run:
        storage = {"storage": f"s3://{bucket}/runs", "storage_options": {"endpoint_url": s3_server.endpoint}}
        run: Run = launch({**TINY, **storage}, *overrides, **fields)
        return run

    return started


def job_of(run: Run) -> str:
    return str(run.attempts[-1].native_id).partition("/")[2]


def put(run: Run, tmp_path: Path, step: int | None) -> None:
    """Publish what a worker would have: a checkpoint, or (None) the result."""
    for name in ("working", "sealed"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "working" / "result.txt").write_text("done")
    save = new_save(run.id, step, world_size=1, node_count=1)
    sealed = seal(tmp_path / "working", tmp_path / f"sealed-{step}")
    publish(run.run_store.store, save, sealed, node=0, leader=True, gather=lambda value: [value])


def shown(run: Run) -> str:
    """What ``sm-llm status`` prints, without the table's spaces."""
    console = Console(width=200)
    with console.capture() as captured:
        console.print(status_table(run.status()))
    return " ".join(captured.get().split())


def test_a_launch_uploads_once_creates_the_job_and_reports_it(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start()
    name = job_of(run)
    assert run.native_uri == f"sagemaker://us-west-2/{name}"
    reported = capsys.readouterr()
    assert reported.out == ""
    assert f"submitted training job {name} (2 x ml.p5.48xlarge)" in reported.err
    assert f"sm-llm logs -f {run.uri}" in reported.err
    sent = dict(sagemaker_double.requests)["CreateTrainingJob"]
    assert json.loads(run.run_store.store.get("requests/attempt-1.json") or b"") == sent
    code = json.loads(sent["HyperParameters"]["sagemaker_submit_directory"])
    folder, _, archive = code.rpartition("/")
    store = open_store(folder, run.record.spec["storage_options"])
    assert store.head(archive) is not None
    again = start(new=True)
    assert "uploaded" in capsys.readouterr().err
    assert json.loads(sagemaker_double.jobs[job_of(again)]["HyperParameters"]["sagemaker_submit_directory"]) == code
    assert run.run_store.store.get("job/attempt-1/job.json") is not None


def test_states_follow_the_service_and_the_end_is_kept(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    run = start()
    name = job_of(run)
    assert run.describe() == (RunState.PENDING, "waiting for capacity")
    sagemaker_double.move(name, "Downloading")
    assert run.describe() == (RunState.PENDING, "downloading input channels")
    sagemaker_double.move(name, "Training")
    assert run.state is RunState.RUNNING
    sagemaker_double.move(name, "Interrupted")
    assert run.state is RunState.RESTARTING
    put(run, tmp_path, None)
    sagemaker_double.move(name, "Completed", BillableTimeInSeconds=90)
    assert run.state is RunState.COMPLETED
    last = run.attempts[-1]
    assert (last.state, last.billable_seconds) == (RunState.COMPLETED, 180)
    calls = len(sagemaker_double.requests)
    assert run.state is RunState.COMPLETED
    assert len(sagemaker_double.requests) == calls


@pytest.mark.parametrize("steps", [False, True])
def test_F2_changes_of_a_resume_stay_with_the_run_only_if_its_job_took_a_step(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, tmp_path: Path, steps: bool
) -> None:
    run = start()
    put(run, tmp_path, 5)
    sagemaker_double.move(job_of(run), "Stopped")
    assert run.state is RunState.INTERRUPTED
    before, change = run.record.asked(), "environment.NCCL_SOCKET_IFNAME=eth9"
    again = run.resume(change)
    changed = again.record.asked()
    if steps:
        local = tmp_path / "container"
        log = EventWriter(RunPaths(local).event_file(2, "rank0"), 2)
        log.write(FirstStep(6))
        log.close()
        uploader = again.run_store.uploader(local, lambda _: True)
        assert uploader is not None
        uploader.upload_all()
    sagemaker_double.move(job_of(again), "Failed", FailureReason="AlgorithmError: eth9 leaves no network interface")
    # Settled by whoever asks first: the status, or the next resume.
    if steps:
        assert again.state is RunState.FAILED
        assert (again.record.asked(), again.record.changes) == (changed, {2: (change,)})
        return
    third = again.resume()
    assert (third.record.asked(), third.record.changes) == (before, {})
    assert third.record.attempts[1].dropped_changes == (change,)
    assert "eth9 leaves no" in str(third.record.attempts[1].reason)
    assert sagemaker_double.jobs[job_of(third)]["Environment"].get("NCCL_SOCKET_IFNAME") != "eth9"


def test_OB13_status_reports_the_bill_of_all_attempts_and_what_spot_saved(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    run = start("backend.spot=true")
    assert "billed" not in shown(run)
    put(run, tmp_path, 5)
    ended = {"TrainingTimeInSeconds": 1800, "BillableTimeInSeconds": 600}
    sagemaker_double.move(job_of(run), "MaxRuntimeExceeded", **ended)
    assert run.state is RunState.INTERRUPTED
    assert "billed 20m00s of all nodes together, 67% less than the 1h00m used" in shown(run)
    again = start("backend.spot=true")
    assert "billed 20m00s" in shown(again)  # the second attempt's is not known yet
    sagemaker_double.move(job_of(again), "Failed", FailureReason="AlgorithmError: no", **ended)
    assert again.state is RunState.FAILED
    assert "billed 40m00s of all nodes together, 67% less than the 2h00m used" in shown(again)
    reported = again.status().to_json()
    assert (reported["billable_seconds"], reported["used_seconds"]) == (2400, 7200)


def test_a_job_that_completes_without_a_result_is_distinguished(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    run = start()
    sagemaker_double.move(job_of(run), "Completed")
    assert run.state is RunState.COMPLETED_UNPUBLISHED


def test_OB09_a_failure_names_the_cause(start: Callable[..., Run], sagemaker_double: SageMakerDouble) -> None:
    run = start()
    reason = "AlgorithmError: ExecuteUserScriptError:\nrank 5: CUDA out of memory"
    sagemaker_double.move(job_of(run), "Failed", FailureReason=reason)
    state, words = run.describe()
    assert state is RunState.FAILED
    assert "rank 5: CUDA out of memory" in str(words)
    with pytest.raises(Exception, match="rank 5"):
        run.wait()


def test_an_end_is_not_written_onto_an_attempt_that_took_its_place(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    """Whoever looks sees the first job's end; meanwhile the next attempt is claimed."""
    run = start()
    before = run.record
    sagemaker_double.move(job_of(run), "Failed", FailureReason="AlgorithmError: boom of the first")
    assert run.state is RunState.FAILED
    again = start()
    assert [it.state for it in again.attempts] == [RunState.FAILED, None]
    polled = jobs.state_of(run.run_store, before, account)
    assert polled == NativeState(RunState.FAILED, "boom of the first")
    assert [it.state for it in again.attempts] == [RunState.FAILED, None]
    taken = again.attempts[0].model_copy(update={"native_id": "us-west-2/pipelines-x-train-2", "state": None})
    run.run_store.update(lambda held: held.with_attempt(taken))
    jobs.state_of(run.run_store, before, account)
    assert run.attempts[0] == taken


@pytest.mark.parametrize("age", [0, 3600])
def test_a_cause_is_what_this_jobs_processes_reported_not_an_earlier_jobs(
    age: int, start: Callable[..., Run], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    """A step of a pipeline that runs again is the same attempt, in another job."""
    run = start()
    assert isinstance(run.run_store, S3RunStore)
    log = RunPaths(tmp_path).event_file(1, "rank3-failure")
    writer = EventWriter(log, 1, clock=lambda: time.time() - age)
    writer.write(Failed(Cause.DATA, "row 7 is empty", rank=3, node=1, step=None, host="algo-2", traceback=""))
    writer.close()
    LogUploader(tmp_path, run.run_store.store, lambda _: True).upload_all()
    sagemaker_double.move(job_of(run), "Failed", FailureReason="AlgorithmError: CUDA out of memory")
    reported = "CUDA out of memory" if age else "rank 3: data error: row 7 is empty"
    assert run.describe() == (RunState.FAILED, reported)


def test_the_same_launch_continues_with_the_run_and_never_twice_at_once(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    run = start()
    sagemaker_double.move(job_of(run), "Training")
    with pytest.raises(SubmitError, match="is running already"):
        start()
    put(run, tmp_path, 5)
    sagemaker_double.move(job_of(run), "MaxRuntimeExceeded")
    assert run.describe() == (RunState.INTERRUPTED, "the time limit backend.max_run_seconds was reached")
    again = start()
    assert again.uri == run.uri
    assert [it.number for it in again.attempts] == [1, 2]
    assert job_of(again).endswith("-2")


def test_a_stop_is_reported_to_the_processes_and_to_sagemaker(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    run = start()
    sagemaker_double.move(job_of(run), "Training")
    run.stop()
    assert run.run_store.store.get("stop") == b"1\n"
    assert "stopping" in str(run.describe()[1])
    sagemaker_double.move(job_of(run), "Stopped")
    assert run.describe() == (RunState.STOPPED, "stopped on request")


@pytest.mark.parametrize(
    ("operation", "refusal", "words"),
    [
        ("CreateTrainingJob", Refusal("ResourceLimitExceeded", "ml.p5.48xlarge: limit 0"), "quota"),
        ("CreateTrainingJob", Refusal("AccessDeniedException", "no"), "iam:PassRole"),
    ],
)
def test_a_refused_job_leaves_no_attempt(
    operation: str, refusal: Refusal, words: str, start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    sagemaker_double.refusals[operation] = refusal
    with pytest.raises(SubmitError, match=words):
        start()
    del sagemaker_double.refusals[operation]
    assert [it.number for it in start().attempts] == [1]


def test_a_refused_resume_leaves_the_run_as_it_was_and_nothing_for_the_next(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, tmp_path: Path
) -> None:
    run = start()
    put(run, tmp_path, 5)
    put(run, tmp_path, 9)
    sagemaker_double.move(job_of(run), "Failed", FailureReason="AlgorithmError: no")
    assert run.state is RunState.FAILED
    before = run.record
    sagemaker_double.refusals["CreateTrainingJob"] = Refusal("ResourceLimitExceeded", "limit 0")
    with pytest.raises(SubmitError, match="quota"):
        run.resume("task.optim.learning_rate=1e-4", step=5)
    assert run.record == before
    assert [it.step for it in run.checkpoints()] == [5, 9]
    sagemaker_double.refusals.clear()
    again = run.resume("task.optim.learning_rate=2e-4", step=5)
    assert [it.step for it in again.checkpoints()] == [5]
    job = json.loads(run.run_store.store.get("job/attempt-2/job.json") or b"")
    assert job["spec"]["task"]["optim"]["learning_rate"] == 2e-4
    sent = dict(sagemaker_double.requests)["CreateTrainingJob"]
    assert json.loads(run.run_store.store.get("requests/attempt-2.json") or b"") == sent


def test_a_job_whose_answer_was_lost_is_the_runs_job(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    sagemaker_double.lost = ["CreateTrainingJob"]
    run = start()
    asked = [operation for operation, _ in sagemaker_double.requests]
    assert asked.count("CreateTrainingJob") == 2  # botocore's second try is told that the name is in use
    assert list(sagemaker_double.jobs) == [job_of(run)]
    assert run.describe() == (RunState.PENDING, "waiting for capacity")


def test_a_job_of_which_nobody_knows_keeps_its_attempt(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    sagemaker_double.lost = ["CreateTrainingJob"]
    sagemaker_double.refusals["DescribeTrainingJob"] = Refusal("AccessDeniedException", "no")
    with pytest.raises(SubmitError, match="may have been created all the same; check it with: sm-llm status s3://"):
        start()
    sagemaker_double.refusals.clear()
    with pytest.raises(SubmitError, match="is pending already"):
        start()
    assert len(sagemaker_double.jobs) == 1


def test_a_name_that_another_job_has_taken_is_reported(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = sagemaker_double._CreateTrainingJob

    def taken(asked: dict[str, Any]) -> dict[str, Any]:
        create({**asked, "HyperParameters": {}})
        return create(asked)

    monkeypatch.setattr(sagemaker_double, "_CreateTrainingJob", taken)
    with pytest.raises(SubmitError, match="a training job of this name exists already"):
        start()
    monkeypatch.undo()


def test_ctrl_c_while_the_job_is_created_leaves_it_to_the_run(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = account("us-west-2").client("sagemaker")
    create = client.create_training_job

    def interrupted(**asked: Any) -> None:
        create(**asked)
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "create_training_job", interrupted)
    with pytest.raises(SubmitError, match=r"was created\. Stop it with: sm-llm stop s3://"):
        start()
    (name,) = sagemaker_double.jobs
    assert attach(f"sagemaker://us-west-2/{name}").attempts[0].native_id == f"us-west-2/{name}"


def test_a_job_that_is_being_created_is_not_taken_for_one_that_never_was(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    sagemaker_double.jobs.clear()
    assert run.describe() == (RunState.PENDING, "its training job is being created")
    with pytest.raises(SubmitError, match="is pending already"):
        start()
    monkeypatch.setattr(jobs, "STARTING_SECONDS", 0.0)
    assert run.describe() == (RunState.STOPPED, "its training job was never created")
    assert [it.number for it in start().attempts] == [1, 2]


def test_a_role_that_does_not_exist_is_reported_before_anything_is_uploaded(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, bucket: str, s3_server: S3Server
) -> None:
    sagemaker_double.roles.clear()
    with pytest.raises(SubmitError, match="there is no role"):
        start()
    keys = [it["Key"] for it in s3_server.client.list_objects_v2(Bucket=bucket).get("Contents", [])]
    assert not [key for key in keys if "bundles" in key or "job.json" in key]


def test_what_has_no_worker_is_refused_before_anything_is_written(
    start: Callable[..., Run], bucket: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NxdSpec, "can", replace(NxdSpec.can, train=False))
    task = {
        "kind": "train",
        "model": {"preset": "llama-3-8b"},
        "data": {"format": "synthetic", "seq_length": 8192},
        "parallelism": {"strategy": "nxd", "tensor_parallel_degree": 32},
        "max_steps": 1,
    }
    trainium = ("compute.instance_type=ml.trn1.32xlarge", "compute.instance_count=1")
    with pytest.raises(PlanError, match="there is no worker for the strategy nxd yet"):
        start("backend.max_run_seconds=600", *trainium, task=task)
    with pytest.raises(PlanError):
        start("backend.max_retry_attempts=31")
    assert "Contents" not in s3_server.client.list_objects_v2(Bucket=bucket)


def test_logs_of_all_hosts_rank_0_first_and_only_new_lines(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    run = start()
    name = job_of(run)
    assert list(run.logs()) == []
    for host in (2, 1):
        sagemaker_double.log(f"{name}/algo-{host}-1700000000", *(f"line {n} of host {host}" for n in range(5)))
    sagemaker_double.log("another/algo-1-1", "not ours")
    lines = list(run.logs())
    assert lines[:5] == [f"[node 0] line {n} of host 1" for n in range(5)]
    assert lines[5:] == [f"[node 1] line {n} of host 2" for n in range(5)]
    assert list(run.logs(node=1, pattern="line 3")) == ["line 3 of host 2"]


def test_the_lines_of_one_rank_are_those_of_its_host_that_begin_with_it(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    run = start()
    name = job_of(run)
    for host in (1, 2):
        ranks = range(8 * host - 8, 8 * host)
        sagemaker_double.log(f"{name}/algo-{host}-1", "the host's own", *(f"[rank {it}] from {it}" for it in ranks))
    assert list(run.logs(rank=9)) == ["from 9"]
    with pytest.raises(SmLlmError, match="there is no rank 16: the run has 16 processes"):
        list(run.logs(rank=16))
    del sagemaker_double.jobs[name]["Environment"]["PET_TEE"]  # a job whose lines do not tell
    assert list(run.logs(rank=9))[:2] == ["the host's own", "[rank 8] from 8"]


def test_OB07_the_end_of_a_long_log_is_enough(start: Callable[..., Run], sagemaker_double: SageMakerDouble) -> None:
    run = start()
    sagemaker_double.log(f"{job_of(run)}/algo-1-1", *map(str, range(60)))
    assert list(run.logs(tail=2)) == ["[node 0] 58", "[node 0] 59"]


def test_OB06_expired_credentials_leave_the_job_alone(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble
) -> None:
    run = start()
    sagemaker_double.refusals["DescribeTrainingJob"] = Refusal("ExpiredTokenException", "expired")
    with pytest.raises(SubmitError, match=f"The job continues; come back to it with: sm-llm logs {run.uri}"):
        run.wait()
    del sagemaker_double.refusals["DescribeTrainingJob"]
    assert run.state is RunState.PENDING
    assert not [name for name, _ in sagemaker_double.requests if name == "StopTrainingJob"]


def test_a_run_is_found_by_its_job_and_by_its_arn(
    start: Callable[..., Run], sagemaker_double: SageMakerDouble, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    monkeypatch.setenv("SM_LLM_ENDPOINT_URL", s3_server.endpoint)
    assert attach(str(run.native_uri)).uri == run.uri
    assert attach(sagemaker_double.jobs[job_of(run)]["TrainingJobArn"]).uri == run.uri


def test_planning_for_sagemaker_loads_no_boto3_client(tmp_path: Path) -> None:
    """A plan needs botocore's model of the service, and nothing of boto3 or the SDK."""
    program = (
        "import sys; from sm_llm.launcher.planner import plan\n"
        "plan('llama-2-7b-fsdp', 'backend.role=arn:aws:iam::123456789012:role/R', 'storage=s3://bucket/runs')\n"
        "print(sorted({'boto3', 'sagemaker', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"
