"""``logs -f`` of a job without a log stream prints where its logs are read, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sm_llm.errors import SubmitError
from sm_llm.launcher.api import launch
from sm_llm.launcher.aws_account import account
from sm_llm.launcher.backends.sagemaker.jobs import jobs, no_logs
from sm_llm.launcher.backends.sagemaker.jobs.no_logs import PATIENCE_SECONDS, NoStream
from tests.launcher.sagemaker.conftest import TINY

if TYPE_CHECKING:
    from sm_llm.launcher.run import Run
    from tests.fixtures.s3_server import S3Server
    from tests.fixtures.sagemaker_double import SageMakerDouble


@pytest.fixture
def run(bucket: str, s3_server: S3Server, sagemaker_double: SageMakerDouble) -> Run:
    storage = {"storage": f"s3://{bucket}/runs", "storage_options": {"endpoint_url": s3_server.endpoint}}
    started: Run = launch({**TINY, **storage})
    return started


def name_of(run: Run) -> str:
    return str(run.attempts[-1].native_id).partition("/")[2]


def test_f11_following_a_job_without_a_stream_states_where_it_looks_and_ends(
    run: Run, sagemaker_double: SageMakerDouble, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of(run)
    sagemaker_double.move(name, "Training")
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(no_logs, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(SubmitError, match="logs:CreateLogStream"):
        list(run.logs(follow=True))
    reported = capsys.readouterr().err
    assert f"/aws/sagemaker/TrainingJobs of us-west-2, streams {name}/" in reported
    assert "Training" in reported


def test_f11_a_look_without_following_reports_it_too(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(run.logs()) == []
    assert f"streams {name_of(run)}/" in capsys.readouterr().err


def test_f11_a_job_that_waits_for_machines_is_waited_for_and_each_status_is_reported_once(
    run: Run, sagemaker_double: SageMakerDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    name = name_of(run)
    now = 0.0
    absence = NoStream(account("us-west-2"), name, run.uri, clock=lambda: now)
    capsys.readouterr()

    def poll(status: str, seconds: float) -> None:
        nonlocal now
        now += seconds
        sagemaker_double.move(name, status)
        absence.note()

    polls: list[tuple[str, float]] = [("Pending", 0), ("Pending", 90_000), ("Downloading", 1), ("Training", 1)]
    for status, seconds in polls:
        poll(status, seconds)
    poll("Training", PATIENCE_SECONDS - 1)
    with pytest.raises(SubmitError):
        poll("Training", 1)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_f11_nothing_is_reported_where_there_are_lines(
    run: Run, sagemaker_double: SageMakerDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    sagemaker_double.log(f"{name_of(run)}/algo-1-1", "hello")
    capsys.readouterr()
    assert list(run.logs()) == ["[node 0] hello"]
    assert capsys.readouterr().err == ""
