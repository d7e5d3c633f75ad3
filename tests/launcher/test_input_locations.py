"""Inputs in S3 and checkpoints to start from are looked for before a job is started."""

from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from sm_llm.cli.app import app
from sm_llm.errors import PlanError
from sm_llm.launcher import api
from sm_llm.launcher.planner import load_whole, plan, plan_loaded
from sm_llm.launcher.planning.input_locations import assert_inputs_exist
from sm_llm.storage.folder import FolderStore
from tests.fixtures.s3_server import READER_KEY

if TYPE_CHECKING:
    from click.testing import Result

    Capture = pytest.CaptureFixture[str]

COMMIT = "ckpt/commits/step-00000040.json"


@pytest.fixture
def base(bucket: str, s3_server: Any) -> str:
    rows = [f"{folder}/{name}" for folder in ("rows", "sets/train") for name in ("state.json", "dataset_info.json")]
    for key in (
        *rows,
        "rows-2/x.txt",
        "lines/a.json",
        "texts/a.txt",
        "wheels/a.whl",
        f"runs/done/{COMMIT}",
        "runs/empty/run.json",
    ):
        s3_server.client.put_object(Bucket=bucket, Key=key, Body=b"x")
    return f"s3://{bucket}"


def probed(endpoint: str, task: dict[str, Any], *, has_begun: bool = False, **fields: Any) -> str:
    """What is wrong with a job, as text."""
    spec = {"name": "look", "task": task, "storage_options": {"endpoint_url": endpoint}, **fields}
    plans = plan_loaded(load_whole(spec))
    try:
        assert_inputs_exist(plans, has_begun=has_begun)
    except PlanError as error:
        return str(error)
    return ""


def train(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "train",
        "model": {"preset": "tiny"},
        "data": {"format": "synthetic", "seq_length": 16, "rows": 64},
        "max_steps": 2,
        **changes,
    }


def rows(location: str) -> dict[str, Any]:
    return train(data={"format": "rows", "seq_length": 16, "train": location})


def test_a_mistyped_address_in_S3_is_reported_and_a_prefix_is_a_folder(s3_server: Any, base: str) -> None:
    endpoint = s3_server.endpoint
    texts = {"kind": "prepare", "seq_length": 16}
    for location in ("rows-2", "rows-2/", "texts/a.txt"):
        assert probed(endpoint, {**texts, "sources": [f"{base}/{location}"]}) == "", location
    assert probed(endpoint, rows(f"{base}/rows/")) == ""
    for location in ("row", "rows/rows", "texts/a"):
        reported = probed(endpoint, rows(f"{base}/{location}"))
        problem = "is not there: no object has this name, and none lies below it"
        assert reported.startswith(f"task.data.train (Python): {problem} (got '{base}/{location}')")
    assert "the bucket does not exist" in probed(endpoint, rows("s3://no-such-bucket/rows"))


def test_every_place_is_reported_at_once_and_a_named_input_once(s3_server: Any, base: str) -> None:
    task = train(data={"format": "rows", "seq_length": 16, "train": "inputs.corpus/train", "validation": f"{base}/no"})
    reported = probed(s3_server.endpoint, task, inputs={"corpus": {"uri": f"{base}/nothing"}})
    assert [line.split()[1] for line in reported.splitlines()[1:]] == ["inputs.corpus", "task.data.validation"]
    assert "task.data.train" in probed(s3_server.endpoint, task, inputs={"corpus": {"uri": f"{base}/rows"}})


def test_S12_6g_rows_are_what_prepare_writes(s3_server: Any, base: str) -> None:
    endpoint = s3_server.endpoint
    problem = "has no state.json and no dataset_info.json"
    for location in ("rows-2", "sets"):
        reported = probed(endpoint, rows(f"{base}/{location}"))
        assert reported.startswith(f"task.data.train (Python): {problem}"), location
    assert "is an object, where a folder of rows" in probed(endpoint, rows(f"{base}/texts/a.txt"))
    data = {"format": "rows", "seq_length": 16, "train": "inputs.corpus/train", "validation": f"{base}/sets"}
    reported = probed(endpoint, train(data=data), inputs={"corpus": {"uri": f"{base}/sets"}})
    assert reported.startswith("task.data.validation (Python): has no state.json")


def test_12e_1_every_place_in_S3_holds_what_its_field_reads(s3_server: Any, base: str) -> None:
    def lines(location: str) -> dict[str, Any]:
        return train(data={"format": "json_rows", "seq_length": 16, "train": f"{base}/{location}"})

    endpoint, prepare = s3_server.endpoint, {"kind": "prepare", "seq_length": 16}
    assert probed(endpoint, lines("lines")) == ""
    assert "no file that ends in .json" in probed(endpoint, lines("texts"))
    assert "is an object, where" in probed(endpoint, lines("lines/a.json"))
    assert "has no tokenizer.json" in probed(endpoint, train(tokenizer=f"{base}/texts"))
    assert "no file that ends in .txt" in probed(endpoint, {**prepare, "sources": [f"{base}/wheels"]})
    weights = {"kind": "convert", "source": f"{base}/texts", "to": "hf"}
    assert "no file that ends in .safetensors" in probed(endpoint, weights)


def test_S12_12_a_manifest_is_searched_for_and_what_it_lists_is_not(s3_server: Any, base: str) -> None:
    data = {"format": "rows", "seq_length": 16, "train": "inputs.corpus/train"}
    role = "arn:aws:iam::111122223333:role/train"
    backend = {"name": "sagemaker", "role": role, "region": "us-east-1", "max_run_seconds": 3600}
    more = {"backend": backend, "compute": {"instance_type": "ml.m5.2xlarge"}, "storage": f"{base}/runs"}

    def reported(location: str) -> str:
        inputs = {"corpus": {"uri": f"{base}/{location}", "data_type": "ManifestFile"}}
        return probed(s3_server.endpoint, train(data=data), inputs=inputs, **more)

    put = partial(s3_server.client.put_object, Bucket=base.removeprefix("s3://"))
    put(Key="lists/good", Body=b'[{"prefix": "s3://bucket/x/"}, "a", "b"]')
    put(Key="lists/short", Body=b'[{"prefix": "s3://bucket/x/"}]')
    put(Key="lists/lines", Body=b'{"source-ref": "s3://bucket/x/a"}')
    assert reported("lists/good") == ""
    for location in ("texts/b.txt", "lists", "lists/", "lists/good/"):
        assert reported(location).startswith("inputs.corpus (Python): is not there: a manifest is one object")
    for location in ("texts/a.txt", "lists/short", "lists/lines"):
        assert reported(location).startswith("inputs.corpus (Python): is not a manifest of SageMaker")


def test_S12_6f_a_wheelhouse_holds_wheels(s3_server: Any, base: str) -> None:
    role = "arn:aws:iam::111122223333:role/train"

    def reported(location: str) -> str:
        backend = {"name": "sagemaker", "role": role, "region": "us-east-1", "wheelhouse": f"{base}/{location}"}
        compute = {"instance_type": "ml.m5.2xlarge"}
        more = {"backend": {**backend, "max_run_seconds": 3600}, "compute": compute, "storage": f"{base}/runs"}
        return probed(s3_server.endpoint, train(), **more)

    assert reported("wheels") == ""
    assert "backend.wheelhouse (Python): is not there" in reported("none")
    assert "backend.wheelhouse (Python): holds no wheel" in reported("texts")


def test_a_checkpoint_to_start_from_must_be_one(s3_server: Any, base: str, tmp_path: Path) -> None:
    folder = FolderStore(tmp_path / "done")
    (tmp_path / "done").mkdir()
    folder.put_if_absent(COMMIT, b"x")
    for root in (f"{base}/runs", str(tmp_path)):

        def start(run: str, *, has_begun: bool = False, root: str = root) -> str:
            task = train(start={"checkpoint": f"{root}/{run}"})
            return probed(s3_server.endpoint, task, has_begun=has_begun)

        assert start("done") == start("done@40") == ""
        assert "has no checkpoint of step 30" in start("done@30")
        assert "It has those of steps 40" in start("done@30")
        assert "task.start.checkpoint (Python): " in start("typo")
        assert start("typo", has_begun=True) == "", "it goes on from its own checkpoint"
    assert "has no checkpoint" in probed(s3_server.endpoint, train(start={"checkpoint": f"{base}/runs/empty"}))


def plan_of(task: dict[str, Any], endpoint: str, *overrides: str) -> Result:
    text = json.dumps({"name": "look", "task": task, "storage_options": {"endpoint_url": endpoint}})
    Path("job.yaml").write_text(text)
    return CliRunner().invoke(app, ["plan", "job.yaml", *overrides])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("here")
def test_E20_plan_reports_a_bucket_that_is_not_there_once(s3_server: Any, base: str) -> None:
    assert plan_of(train(), s3_server.endpoint, f"storage={base}/not-yet").exit_code == 0
    task = rows("s3://no-such-bucket/rows")
    task["start"] = {"checkpoint": "s3://no-such-bucket/run@3"}
    result = plan_of(task, s3_server.endpoint, "storage=s3://no-such-bucket/runs")
    assert isinstance(result.exception, PlanError)
    (fault,) = result.exception.issues
    assert (fault.path, fault.origin) == ("storage", "command line")
    assert "the bucket does not exist" in fault.message


@pytest.mark.usefixtures("here")
def test_E20_a_dry_run_looks_up_what_plan_does(s3_server: Any, base: str) -> None:
    plan_of(train(), s3_server.endpoint)  # writes the file
    result = CliRunner().invoke(app, ["fit", "job.yaml", "--dry-run", "storage=s3://no-such-bucket/runs"])
    assert isinstance(result.exception, PlanError)
    assert result.stdout == ""
    (issue,) = result.exception.issues
    assert (issue.path, issue.code) == ("storage", "bucket-not-found")


@pytest.mark.usefixtures("here")
def test_E20_plan_names_what_it_could_not_check(s3_server: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    denied = plan_of(train(), s3_server.endpoint, f"storage={base}/runs")
    assert (denied.exit_code, denied.stderr.count("storage: cannot be checked from here")) == (0, 1)
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    without = plan_of(rows(f"{base}/typo"), s3_server.endpoint, "storage=s3://no-such-bucket/runs")
    assert without.exit_code == 0
    reported = f"storage=s3://no-such-bucket/runs, task.data.train={base}/typo"
    assert without.stderr == f"not checked (there are no AWS credentials here): {reported}\n"


def test_a_store_that_does_not_answer_is_asked_once(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sm_llm.launcher.planning.input_locations.CONFIG", {"connect_timeout": 1, "retries": {"total_max_attempts": 1}}
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        task = train(
            data={"format": "rows", "seq_length": 16, "train": "s3://one-bucket/a", "validation": "s3://other/b"}
        )
        assert probed(f"http://127.0.0.1:{nobody.getsockname()[1]}", task) == ""
    assert capsys.readouterr().err.count("cannot be checked from here") == 1


def test_E20_a_checkpoint_to_start_from_is_read_by_the_plan(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir()
    FolderStore(tmp_path / "done").put_if_absent(COMMIT, b"x")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for location, problem in (
        ("typo", "is not there"), ("model", "has no checkpoint"), ("done@30", "has no checkpoint of step 30"),
        ("done", None), ("done@40", None),
    ):  # fmt: skip
        spec = {"name": "look", "task": train(start={"checkpoint": f"{tmp_path}/{location}"})}
        if problem is None:
            plan(spec)
            continue
        with pytest.raises(PlanError) as raised:
            plan(spec)
        (fault,) = raised.value.issues
        assert (fault.path, problem in fault.message) == ("task.start.checkpoint", True), location


def test_what_cannot_be_read_from_here_is_left_to_the_job(
    base: str, s3_server: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER_KEY)
    assert probed(s3_server.endpoint, rows(f"{base}/typo")) == ""
    assert capsys.readouterr().err.startswith("task.data.train: cannot be checked from here: s3://")
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    assert probed(s3_server.endpoint, rows(f"{base}/typo")) == ""
    assert "Unable to locate credentials" in capsys.readouterr().err


def test_a_launch_with_a_mistyped_input_writes_nothing(base: str, s3_server: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"task\.data\.train"):
        api.launch(
            {"name": "look", "storage": str(tmp_path / "runs"), "task": rows(f"{base}/typo")},
            storage_options={"endpoint_url": s3_server.endpoint},
        )
    assert not (tmp_path / "runs").exists()
